"""Converts the .bin weights in a model's directory to safetensors; the files appear when all are complete."""

import re
import shutil
import sys
from pathlib import Path

from tgis.errors import StartError
from tgis.models import child_process
from tgis.models.files import shard_files
from tgis.models.progress_bar import format_bytes
from tgis.models.staging import staging_directory
from tgis.utils.file_lock import locked

INDEX_SUFFIX = ".index.json"
STAGING_PREFIX = ".safetensors-"  # of the directory where they are written
NOT_WEIGHTS = re.compile("arguments|args|training|optimizer|scheduler|index")  # in names of other .bin files


def convert_weights(path: Path) -> str:
    """Convert the weights in directory `path`; returns one line that says what was done.

    StartError if a file is broken or holds anything but tensors, or if the disk is full; nothing is changed then.
    """
    indexes = sorted(path.glob(f"*.bin{INDEX_SUFFIX}"))
    if len(indexes) > 1:
        return f"{path} has {len(indexes)} indexes of .bin weights, {indexes[0].name} is one: nothing to do"
    sources = shard_files(indexes[0]) if indexes else _sources(path)
    if not sources:
        return f"{path} has no .bin weights: nothing to do"
    try:
        with locked(sources[0]):
            if found := _already_converted(path, [file.name for file in indexes or sources]):
                return f"{path} has {found} already: nothing to do (delete it to convert again)"
            return _convert(path, sources)
    except OSError as error:
        raise StartError(f"cannot convert the weights in {path}: {error.strerror or error}") from error


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


def _convert(path: Path, sources: list[Path]) -> str:
    for left in path.glob(f"{STAGING_PREFIX}*"):  # of a killed process
        shutil.rmtree(left, ignore_errors=True)
    need, free = sum(file.stat().st_size for file in sources), shutil.disk_usage(path).free
    if need > free:
        raise StartError(
            f"converting the weights in {path} needs {format_bytes(need)}, "
            f"and its file system has {format_bytes(free)} free"
        )
    names = [file.name for file in sources]
    with staging_directory(path, STAGING_PREFIX) as staging:
        command = [sys.executable, "-m", "tgis.models.convert.weights_child", str(path), str(staging), *names]
        if reason := child_process.run(command, None, show_output=True):
            raise StartError(f"cannot convert the weights in {path}: {reason}")
        made = sorted(staging.iterdir(), key=lambda file: (file.name.endswith(INDEX_SUFFIX), file.name))
        for file in made:
            file.replace(path / file.name)
    return f"{path}: {', '.join(names)} converted to safetensors, every bit compared"
