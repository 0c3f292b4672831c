"""A place to build files that must appear complete or not at all."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def staging_directory(parent: Path, prefix: str = ".") -> Iterator[Path]:
    """A temporary directory in `parent`, to rename or to move files from; removed at the end if it is still there."""
    path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    try:
        path.chmod(0o755)
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
