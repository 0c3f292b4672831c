"""A directory for temporary files of a process and its children."""

import contextlib
import fcntl
import logging
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tgis.utils.file_lock import locked

_ATTEMPTS = 5

log = logging.getLogger(__name__)


@contextlib.contextmanager
def scratch_directory(parent: Path) -> Iterator[Path | None]:
    """A new directory in `parent`, which holds nothing else, removed at the end; None where none can be made.

    A process that is killed leaves its directory behind, but not the lock in it: the next process removes it.
    """
    path = None
    with contextlib.ExitStack() as stack:
        try:
            parent.mkdir(mode=0o700, exist_ok=True)
            with locked(parent / "lock"):
                for left in parent.glob("*/"):
                    _remove_unless_locked(left)
                path = Path(tempfile.mkdtemp(dir=parent))
                stack.callback(_remove, path)
                stack.enter_context(locked(path / "lock"))
        except OSError as error:
            log.warning("temporary files are not in %s: %s", parent, error)
        yield path


def _remove_unless_locked(path: Path) -> None:
    with contextlib.suppress(OSError), (path / "lock").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove(path)


def _remove(path: Path) -> None:
    """Again and again, as long as children add to it."""
    for _ in range(_ATTEMPTS):
        shutil.rmtree(path, ignore_errors=True)
