"""Measured costs, kept under CACHE_DIR from one start to the next.

A file is found by a hash of all that a measurement depends on. Whatever is wrong with it is one line in the log,
and a new measurement.
"""

import hashlib
import importlib.metadata
import logging
import os
from contextlib import suppress
from pathlib import Path

import msgspec

import tgis
from tgis.engines.base import Engine
from tgis.engines.memory.fitting import StepCosts
from tgis.ipc.messages import EngineOptions

log = logging.getLogger(__name__)

_MOST_BYTES = 1 << 20  # far above any honest file

Key = dict[str, str | int | None]


class CachedProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file: what was measured, and by what circumstances; the latter for people, and against collisions."""

    circumstances: Key
    costs: StepCosts


def profile_key(engine: Engine, options: EngineOptions, memory_limit: int) -> Key:
    """All that a measurement depends on."""
    info = engine.info
    return {
        "torch": importlib.metadata.version("torch"),
        "transformers": importlib.metadata.version("transformers"),
        "tgis": tgis.__version__,
        "engine": type(engine).__name__,
        "model": _model_fingerprint(Path(options.model_path)),
        "dtype": info.dtype,
        "device": info.device,
        "threads": options.num_threads,
        "shards": options.num_shards,
        "memory_limit": memory_limit,
        "max_batch_size": info.max_batch_size,
        "max_sequence_length": options.max_sequence_length,
    }


def load(cache_dir: str, key: Key) -> StepCosts | None:
    """What was measured under the same circumstances, if it is there and sound."""
    file = _file(cache_dir, key)
    try:
        with file.open("rb") as opened:
            kept = msgspec.json.decode(opened.read(_MOST_BYTES), type=CachedProfile)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, msgspec.DecodeError) as error:
        log.warning("%s cannot be used, memory is measured again: %s", file, error)
        return None
    if kept.circumstances != key or not kept.costs.sound:
        log.warning("%s is not what was kept there, memory is measured again", file)
        return None
    log.info("memory was measured at an earlier start: %s", file)
    return kept.costs


def save(cache_dir: str, key: Key, costs: StepCosts) -> None:
    """Keep it for the next start, if that is possible."""
    file = _file(cache_dir, key)
    staging = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        staging.write_bytes(msgspec.json.format(msgspec.json.encode(CachedProfile(key, costs)), indent=1))
        staging.replace(file)
    except OSError as error:
        with suppress(OSError):
            staging.unlink()
        log.warning("%s cannot be kept, memory will be measured at the next start too: %s", file, error)


def _file(cache_dir: str, key: Key) -> Path:
    name = hashlib.sha256(msgspec.json.encode(key, order="sorted")).hexdigest()[:16]
    return Path(cache_dir) / "memory" / f"{name}.json"


def _model_fingerprint(directory: Path) -> str:
    """Names, sizes and times of the model's files."""
    found = hashlib.sha256()
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        facts = path.stat()
        found.update(f"{path.relative_to(directory)} {facts.st_size} {facts.st_mtime_ns}\n".encode())
    return found.hexdigest()[:16]
