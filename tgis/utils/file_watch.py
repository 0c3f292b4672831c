"""Tells whether files have been replaced; `FileWatch` at the price of a look once a second at most."""

import os
import time
from collections.abc import Callable, Iterable, Sequence

CHECK_INTERVAL_SECONDS = 1.0

Signature = tuple[tuple[int, int, int] | None, ...]


def file_signature(paths: Iterable[str]) -> Signature:
    """What changes when a file does: inode, time of change in nanoseconds and size; None for one that is not there."""
    return tuple(_stat(path) for path in paths)


def _stat(path: str) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


class FileWatch:
    """Some files, or links on the way to them as Kubernetes swaps them. Not safe for several threads."""

    def __init__(self, paths: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        """Their present state counts as known; `clock` is in seconds."""
        self._paths = paths
        self._clock = clock
        self._checked_at = clock()
        self._signature = file_signature(paths)

    def changed(self) -> bool:
        """Whether they differ from what was last known."""
        now = self._clock()
        if now - self._checked_at < CHECK_INTERVAL_SECONDS:
            return False
        self._checked_at = now
        # Known before they are read, so that a swap in the middle of reading is seen the next time.
        before, self._signature = self._signature, file_signature(self._paths)
        return before != self._signature
