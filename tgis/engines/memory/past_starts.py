"""What an earlier start has measured, for later ones of the same kind.

A kind of start is everything that the measurement depends on; each has a file in CACHE_DIR, named by its digest.
"""

import json
import logging
import os
import platform
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import msgspec
import torch

import tgis
from tgis.engines.memory.available import total_memory
from tgis.ipc.messages import EngineOptions
from tgis.models.staging import files_key
from tgis.utils.logs import format_bytes

log = logging.getLogger(__name__)

_MAX_FILES = 64
_CPUINFO = Path("/proc/cpuinfo")
_VARYING = ("processor", "cpu MHz", "core id", "apicid", "initial apicid", "bogomips")


def recall(options: EngineOptions, device: torch.device, measure: Callable[[], int]) -> int:
    """The number that `measure` has returned in an earlier start of this kind, or returns now.

    GPUs and several ranks measure each time: others use the former, and the latter must do the same.
    """
    if options.verify_start or device.type != "cpu" or options.num_shards > 1 or not options.cache_dir:
        return measure()
    path = Path(options.cache_dir) / "starts" / f"{_digest(options, device)}.json"
    found = _read(path)
    if found is None:
        found = measure()
        _write(path, found)
    else:
        log.info("an earlier start has measured %s (%s)", format_bytes(found), path)
    return found


def _read(path: Path) -> int | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=int)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        log.warning("%s is ignored: %s", path, error)
        return None


def _write(path: Path, number: int) -> None:
    """Keep it, and no more than some files."""
    new = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(exist_ok=True)
        new.write_text(json.dumps(number))
        new.rename(path)
        for old in sorted(path.parent.iterdir(), key=lambda file: file.stat().st_mtime)[:-_MAX_FILES]:
            old.unlink()
    except OSError as error:
        log.warning("the next start measures again: %s", error)


def _digest(options: EngineOptions, device: torch.device) -> str:
    cpu = {line for line in _CPUINFO.read_text().splitlines() if line.partition("\t")[0].strip() not in _VARYING}
    versions = (version(name) for name in ("torch", "transformers"))
    facts = repr(msgspec.to_builtins(options)), str(total_memory(device)), platform.release(), *sorted(cpu), *versions
    folders = Path(options.model_path), Path(tgis.__file__).parent
    files = (path for folder in folders for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc")
    return files_key(files, *facts)
