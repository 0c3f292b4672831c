"""Defaults of options that depend on this machine, its environment, or the name under which the server is started."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tgis.utils.cpus import usable_cores, usable_cpus

MAX_THREADS = 4096
MAX_GRACE_SECONDS = 86400.0
LAUNCHER = "text-generation-launcher"  # TGIS's command
ADAPTER: dict[str, Any] = {"port": 8000, "default_max_new_tokens": 0}  # vllm-tgis-adapter's


def launcher(environ: Mapping[str, str]) -> dict[str, Any]:
    """The defaults of TGIS: no generation on the port of the metrics, a drain that waits for all calls until SIGKILL,
    and a rank for each visible GPU.
    """
    devices = environ.get("CUDA_VISIBLE_DEVICES", environ.get("NVIDIA_VISIBLE_DEVICES", "all"))
    num_gpus = devices.count(",") + 1
    return {"http_api": False, "shutdown_grace_seconds": MAX_GRACE_SECONDS, "num_shard": num_gpus}


def num_threads() -> int:
    """The number of threads that PyTorch would start, limited by the CPU quota of a container."""
    first = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]  # the others are for nested parallel regions
    return int(first) if first.isdecimal() and 0 < int(first) <= MAX_THREADS else usable_cores()


def tokenization_workers() -> int:
    return min(max(usable_cpus() - 1, 2), 8)


def cache_dir() -> Path:
    """A directory of this user in the temporary directory, which is writable everywhere."""
    return Path(os.environ.get("TMPDIR") or "/tmp") / f"tgis-{os.getuid()}"  # noqa: S108 - prepare_cache_dir() checks it


def hf_home() -> Path:
    """The default of huggingface_hub."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "huggingface"
