"""Locks between processes, which the kernel releases when their holder dies."""

import contextlib
import fcntl
import sys
from collections.abc import Iterator
from pathlib import Path


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
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(f"waiting for another process to release {path}", file=sys.stderr, flush=True)
                fcntl.flock(file, fcntl.LOCK_EX)
        yield
