"""What downloads and conversions of model files share: child processes, staging, copies of config files."""

import contextlib
import hashlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tgis.errors import StartError, file_errors
from tgis.models.files import CONFIG_EXTENSIONS
from tgis.utils import stop_signals
from tgis.utils.file_lock import locked

MAX_REASON_LENGTH = 300


@contextlib.contextmanager
def staging_directory(parent: Path, prefix: str = ".") -> Iterator[Path]:
    """A temporary directory in `parent`, to rename or to move files from; removed at the end if it is still there."""
    with tempfile.TemporaryDirectory(prefix=prefix, dir=parent, ignore_cleanup_errors=True) as name:
        path = Path(name)
        path.chmod(0o755)
        yield path


@contextlib.contextmanager
def new_model(out: Path, command: str, extra: str, packages: Iterable[str]) -> Iterator[Path]:
    """A staging directory for what becomes directory `out`; StartError if that is there or cannot be written, or the
    packages that the command needs are missing.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise StartError(f"{out} is there already")
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        raise StartError(f"{command} needs {' and '.join(missing)}: pip install '.[{extra}]' in a checkout")
    with file_errors(f"cannot write {out}"):
        out.parent.mkdir(parents=True, exist_ok=True)
        with staging_directory(out.parent, f".{out.name}-") as staging:
            yield staging


def replace_config_files(source: Path, made: Path, kept: Iterable[str]) -> None:
    """Replace all files that match no pattern of `kept` by the config and tokenizer of the model in `source`."""
    for file in made.iterdir():
        if any(map(file.match, kept)):
            file.chmod(0o644)  # safetensors makes its files readable by their owner only
        else:
            file.unlink()
    for file in source.iterdir():
        wanted = file.name.endswith((*CONFIG_EXTENSIONS, ".jinja")) and not file.name.endswith(".index.json")
        if wanted and file.is_file() and not (made / file.name).exists():
            shutil.copyfile(file, made / file.name)


def made_once(target: Path, make: Callable[[Path], None]) -> Path:
    """The directory `target`, which `make` fills when it is missing."""
    with locked(target.with_suffix(".lock")):
        if not target.is_dir():
            with staging_directory(target.parent) as made:
                make(made)
                os.sync()  # after a loss of power, what has this name is whole
                made.rename(target)
    return target


def files_key(files: Iterable[Path], *others: str) -> str:
    """A hash of what identifies files without reading them, and of other facts."""
    digest = hashlib.sha256("\0".join(others).encode())
    for file in sorted(files):
        stat = file.stat()
        facts = f"\0{file.name}\0{file.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}"
        digest.update(os.fsencode(facts))  # names of files may not be UTF-8
    return digest.hexdigest()[:32]


def num_bytes(folder: Path) -> int:
    """The size of all files in a folder that others may be writing."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def run_child(command: list[str], seconds: float | None) -> str | None:
    """Run `command` for at most `seconds`; None on success, else the last line of its stderr."""
    null, pipe = subprocess.DEVNULL, subprocess.PIPE
    try:
        with stop_signals.undoing():  # kills the child
            done = subprocess.run(command, stdin=null, stdout=null, stderr=pipe, check=False, timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"not done after {seconds:.0f} s"
    if done.returncode == 0:
        return None
    if done.returncode < 0:
        return f"killed by {signal.Signals(-done.returncode).name}"
    lines = [line.strip() for line in done.stderr.decode("utf-8", "replace").splitlines()]
    return next((line for line in reversed(lines) if line), f"exit code {done.returncode}")[:MAX_REASON_LENGTH]


@contextlib.contextmanager
def timed(label: str) -> Iterator[None]:
    """Print when the block starts and how long it took."""
    print(f"{label} ...", file=sys.stderr, flush=True)
    start = time.monotonic()
    yield
    print(f"{label}: {time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)
