"""Files that are read again when they change, by looking at their metadata."""

import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

from tgis.errors import OptionError

CHECK_INTERVAL_SECONDS = 1.0

T = TypeVar("T")
Signature = tuple[tuple[int, int, int] | None, ...]

_log = logging.getLogger(__name__)


def file_signature(paths: Iterable[str]) -> Signature:
    """Inode, modification time in ns and size of each file; None for a missing one."""
    return tuple(_stat(path) for path in paths)


def _stat(path: str) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


class WatchedFiles(Generic[T]):
    """What `load` makes of files, looked at once a second at most, following symlinks, which Kubernetes swaps.

    OptionError at first if they are unusable; later that is logged, and what was loaded last stays in use.
    """

    def __init__(
        self, paths: Sequence[str], load: Callable[[], T], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`clock` is in seconds."""
        self._paths = paths
        self._load = load
        self._clock = clock
        self._checked_at = clock()
        self._seen = file_signature(paths)  # before they are read, so that a change meanwhile is noticed
        self._value = load()

    def value(self) -> T:
        """What was loaded last. Threads that look at the same time may both load, which does no harm."""
        now = self._clock()
        if now - self._checked_at >= CHECK_INTERVAL_SECONDS:
            self._checked_at = now
            self._reload_if_changed()
        return self._value

    def _reload_if_changed(self) -> None:
        signature = file_signature(self._paths)
        if signature != self._seen:
            try:
                self._value, self._seen = self._load(), signature
                _log.info("reloaded %s", ", ".join(self._paths))
            except OptionError as error:  # perhaps only for now: no free descriptor
                _log.warning("changed files are unusable, the previous ones stay in use: %s", error)
