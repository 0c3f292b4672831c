"""Detects changed files, by looking at their metadata."""

import os
import time
from collections.abc import Callable, Iterable, Sequence

CHECK_INTERVAL_SECONDS = 1.0

Signature = tuple[tuple[int, int, int] | None, ...]


def file_signature(paths: Iterable[str]) -> Signature:
    """Inode, modification time in ns and size of each file; None for a missing one."""
    return tuple(_stat(path) for path in paths)


def _stat(path: str) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


class FileWatch:
    """Checks files at most once a second, following symlinks, which Kubernetes swaps. Not thread-safe."""

    def __init__(self, paths: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        """Changes from now on are reported; `clock` is in seconds."""
        self._paths = paths
        self._clock = clock
        self._checked_at = clock()
        self._signature = file_signature(paths)
        self._failed = False
        self._error: tuple[Signature, str] | None = None

    def changed(self) -> bool:
        """Return true if a file has changed since the previous check, or if what changed then could not be read."""
        now = self._clock()
        if now - self._checked_at < CHECK_INTERVAL_SECONDS:
            return False
        self._checked_at = now
        # Taken before the caller reads the files, so that a change while it reads is noticed next time.
        before, self._signature = self._signature, file_signature(self._paths)
        changed, self._failed = self._failed or before != self._signature, False
        return changed

    def failed(self, error: Exception) -> bool:
        """Report that the files cannot be used, perhaps only for now (no free descriptor), so that the next check
        returns true again; return true for an error that is new.
        """
        self._failed = True
        before, self._error = self._error, (self._signature, str(error))
        return before != self._error
