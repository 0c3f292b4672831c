"""Locks between processes, which the kernel releases when their holder dies, and directories that live as long."""

import contextlib
import fcntl
import logging
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

_RETRY_SECONDS = 0.1

log = logging.getLogger(__name__)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file, created if it is missing and never written to.

    Where locking is impossible (some network file systems, read-only directories) the block runs without it, so it
    must be correct even if another process runs it at the same time.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(path.open("ab"))
            if not _lock(file):
                print(f"waiting for another process to let go of {path}", file=sys.stderr, flush=True)
                while not _lock(file):  # a call that waits might miss a signal that has come just before it
                    time.sleep(_RETRY_SECONDS)
        yield


def _lock(file: IO[bytes]) -> bool:
    """Take the lock if it is free."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def scratch_directory(parent: Path) -> Iterator[Path | None]:
    """A new directory in `parent`, which holds nothing else, removed at the end; None where none can be made.

    A process that is killed leaves its directory behind, but not the lock in it: the next process removes it, as what
    children have added during a removal.
    """
    path = None
    with contextlib.ExitStack() as stack:
        try:
            parent.mkdir(mode=0o700, exist_ok=True)
            with locked(parent / "lock"):
                for left in parent.glob("*/"):
                    _remove_unless_locked(left)
                path = Path(tempfile.mkdtemp(dir=parent))
                stack.callback(shutil.rmtree, path, ignore_errors=True)
                stack.enter_context(locked(path / "lock"))
        except OSError as error:
            log.warning("temporary files are not in %s: %s", parent, error)
        yield path


def _remove_unless_locked(path: Path) -> None:
    with contextlib.suppress(OSError), (path / "lock").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
