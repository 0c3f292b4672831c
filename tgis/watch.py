"""Tells when files have been replaced, at the price of a look once a second at most."""

import contextlib
import os
import time
from collections.abc import Callable, Sequence

CHECK_SECONDS = 1.0


class FileWatch:
    """Some files, or links on the way to them as Kubernetes swaps them. Not safe for several threads."""

    def __init__(self, paths: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        """Their present state counts as known; `clock` is in seconds."""
        self._paths = paths
        self._clock = clock
        self._checked_at = clock()
        self._signature = self._look()

    def changed(self) -> bool:
        """Whether they differ from what was last known."""
        now = self._clock()
        if now - self._checked_at < CHECK_SECONDS:
            return False
        self._checked_at = now
        # Known before they are read, so that a swap in the middle of reading is seen the next time.
        before, self._signature = self._signature, self._look()
        return before != self._signature

    def _look(self) -> list[tuple[int, int, int]]:
        signature = []
        for path in self._paths:
            with contextlib.suppress(OSError):
                status = os.stat(path)
                signature.append((status.st_ino, status.st_mtime_ns, status.st_size))
        return signature
