"""Sets the environment of a process and of its children before libraries read it."""

import os
import sys
import tempfile

from tgis.config import Config
from tgis.errors import StartError, file_errors
from tgis.utils.private_directory import refusal_of

LIBRARY_ENVIRONMENT = {  # defaults that the environment overrides
    # OpenMP threads meet at thousands of barriers per step. Spinning forever, the default, makes steps ten times as
    # long once other processes need the cores; sleeping immediately makes them 1.5 times as long at all times.
    "GOMP_SPINCOUNT": "3000",
    # oneDNN generates code per number of tokens and layer shape, 0.5 MiB each, and caches 1024 of them by default.
    **dict.fromkeys(("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"), "128"),
    # TOKENIZATION_WORKERS are all threads that tokenize: one call's batch must not keep every core from the others'.
    "TOKENIZERS_PARALLELISM": "false",
    # Without it, a caller that has not sampled its own span decides that there is none of ours.
    "OTEL_TRACES_SAMPLER": "always_on",
}


def prepare_command() -> None:
    """Set environment variables that every command needs, before it imports a library or starts a child."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # it logs what our errors and log lines say already
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"  # otherwise gRPC's threads start again whenever we start a process
    if sys.stderr is None or not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # no progress bars of libraries
    os.environ["PYTHONSAFEPATH"] = "1"  # no modules of the working directory: it may be that of a model


def prepare_environment(config: Config) -> None:
    """Create the cache directory and set environment variables for libraries in this process and its children.

    Call it before importing those. StartError if the directory cannot be created or trusted.
    """
    prepare_cache_dir(config)
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(config.hub_cache)}
    cache = config.cache_dir.absolute()  # compilers run in other working directories
    with file_errors("CACHE_DIR: cannot make the directory of temporary files"):
        (cache / "tmp").mkdir(mode=0o700, exist_ok=True)
    os.environ["TMPDIR"] = str(cache / "tmp")  # compilers turn temporary files into code: no other user may write there
    os.environ.setdefault("TRITON_CACHE_DIR", str(cache / "triton"))
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache / "inductor"))
    prepare_libraries()
    if not os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True").strip():
        del os.environ["PYTORCH_CUDA_ALLOC_CONF"]


def prepare_libraries() -> None:
    """Set environment variables that libraries read when they are imported."""
    for name, value in LIBRARY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def prepare_cache_dir(config: Config) -> None:
    """Create it; StartError if others can replace what is in it, where code is loaded from."""
    directory = config.cache_dir
    with file_errors(f"CACHE_DIR: cannot make or write to {directory}"):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        refusal = refusal_of(directory)
        tempfile.TemporaryFile(dir=directory).close()  # the file system may be read-only, whatever the mode says
    if refusal:
        raise StartError(f"CACHE_DIR: {refusal}: name a directory of your own")
