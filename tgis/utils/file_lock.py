"""A lock between processes; the kernel releases it when its holder dies."""

import contextlib
import fcntl
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

_RETRY_SECONDS = 0.1


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
    """Whether it was free."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
