"""Converts the .bin weights in a model's directory to safetensors; the files appear when all are complete."""

import logging
import re
import shutil
import sys
from pathlib import Path

from tgis.errors import StartError, file_errors
from tgis.models import staging
from tgis.models.files import SAFETENSORS, find_weights, shard_files
from tgis.utils.file_lock import locked
from tgis.utils.progress import watched

log = logging.getLogger(__name__)

INDEX_SUFFIX = ".index.json"
STAGING_PREFIX = ".safetensors-"  # prefix of temporary directories
NOT_WEIGHTS = re.compile("arguments|args|training|optimizer|scheduler|index")  # names of other .bin files


def ensure_weights(path: Path, cache_dir: Path) -> Path:
    """The model's directory, unless it has .bin weights only: then one below `cache_dir`/weights, converted once.

    The other files of the model are there too, as links.
    """
    if not needs_conversion(path):
        find_weights(path)
        return path
    target = cache_dir / "weights" / staging.files_key(path.glob("*.bin*"))
    with file_errors(f"cannot keep converted weights for {path}"), locked(target.with_suffix(".lock")):
        target.mkdir(parents=True, exist_ok=True)
        for file in path.iterdir():
            if not file.name.endswith(".bin"):
                (target / file.name).unlink(missing_ok=True)
                (target / file.name).symlink_to(file.resolve())
        log.info("%s has no safetensors: serving those made of its .bin files, in %s", path, target)
        log.info("%s", convert_weights(path, target))
    find_weights(target)
    return target


def needs_conversion(path: Path) -> bool:
    """Whether the weights in directory `path` are .bin files only."""
    return not any((path / name).is_file() for name in SAFETENSORS) and bool(_sources(path))


def convert_weights(path: Path, out: Path | None = None) -> str:
    """Convert the weights in directory `path`, into `out` if given; returns one line that says what was done.

    StartError if a file is broken or holds anything but tensors, or if the disk is full; nothing is changed then.
    """
    out = out or path
    indexes = sorted(path.glob(f"*.bin{INDEX_SUFFIX}"))
    if len(indexes) > 1:
        return f"{path} has {len(indexes)} indexes of .bin weights, {indexes[0].name} is one: nothing to do"
    sources = shard_files(indexes[0]) if indexes else _sources(path)
    if not sources:
        return f"{path} has no .bin weights: nothing to do"
    with file_errors(f"cannot convert the weights in {path}"), locked(sources[0]):
        if found := _already_converted(out, [file.name for file in indexes or sources]):
            return f"{out} has {found} already: nothing to do (delete it to convert again)"
        return _convert(path, sources, out)


def target_name(source: str) -> str:
    """`pytorch_model-1.bin` as `model-1.safetensors`, `pytorch_model.bin.index.json` likewise."""
    index = INDEX_SUFFIX if source.endswith(INDEX_SUFFIX) else ""
    return source.removeprefix("pytorch_").removesuffix(f".bin{index}") + f".safetensors{index}"


def _sources(path: Path) -> list[Path]:
    return [file for file in sorted(path.glob("*.bin")) if file.is_file() and not NOT_WEIGHTS.search(file.name)]


def _already_converted(path: Path, sources: list[str]) -> str | None:
    """The name of a finished conversion's last file, or of safetensors that are preferred anyway."""
    names = {target_name(source) for source in sources}
    if all((path / name).exists() for name in names):
        return max(names)
    return "model.safetensors" if (path / "model.safetensors").exists() else None


def _convert(path: Path, sources: list[Path], out: Path) -> str:
    for left in out.glob(f"{STAGING_PREFIX}*"):  # a killed process leaves its directory
        shutil.rmtree(left, ignore_errors=True)
    names = [file.name for file in sources]
    with staging.staging_directory(out, STAGING_PREFIX) as made_in:
        command = [sys.executable, "-m", "tgis.models.convert.weights_child", str(path), str(made_in), *names]
        total = sum(file.stat().st_size for file in sources)
        with watched("converting", lambda: staging.num_bytes(made_in), total, "B"):
            reason = staging.run_child(command, None)
        if reason:
            raise StartError(f"cannot convert the weights in {path}: {reason}")
        made = sorted(made_in.iterdir(), key=lambda file: (file.name.endswith(INDEX_SUFFIX), file.name))
        for file in made:
            file.replace(out / file.name)
    return f"{path}: {', '.join(names)} converted to safetensors"
