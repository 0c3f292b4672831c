"""Safetensors made of the .bin weights in a model's directory, by a child process; they get their names at the end."""

import re
import shutil
import sys
import tempfile
from pathlib import Path

from tgis.errors import StartError
from tgis.models.files import shard_files
from tgis.utils import child_process
from tgis.utils.file_lock import locked
from tgis.utils.progress_bar import format_bytes

INDEX_SUFFIX = ".index.json"
STAGING_PREFIX = ".safetensors-"  # how the directory begins in which they grow
NOT_WEIGHTS = re.compile("arguments|args|training|optimizer|scheduler|index")  # in the name of a .bin file


def convert_weights(path: Path) -> str:
    """Convert what is to be converted in directory `path`; returns what was done, in a line.

    StartError if a file holds anything but tensors, is broken, or the disk is full; nothing is changed then.
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
    """The last file to get its name, or weights that are served rather than any others."""
    names = {target_name(source) for source in sources}
    if all((path / name).exists() for name in names):
        return max(names)
    return "model.safetensors" if (path / "model.safetensors").exists() else None


def _convert(path: Path, sources: list[Path]) -> str:
    for left in path.glob(f"{STAGING_PREFIX}*"):  # by a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    need, free = sum(file.stat().st_size for file in sources), shutil.disk_usage(path).free
    if need > free:
        raise StartError(
            f"converting the weights in {path} needs {format_bytes(need)}, "
            f"and its file system has {format_bytes(free)} free"
        )
    staging = Path(tempfile.mkdtemp(prefix=STAGING_PREFIX, dir=path))
    try:
        names = [file.name for file in sources]
        command = [sys.executable, "-m", "tgis.models.convert.convert_weights", str(path), str(staging), *names]
        if reason := child_process.run(command, None, show_output=True):
            raise StartError(f"cannot convert the weights in {path}: {reason}")
        made = sorted(staging.iterdir(), key=lambda file: (file.name.endswith(INDEX_SUFFIX), file.name))
        for file in made:
            file.replace(path / file.name)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return f"{path}: {', '.join(names)} converted to safetensors, every bit compared"
