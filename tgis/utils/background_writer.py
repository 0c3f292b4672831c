"""Writes to stdout or stderr in a thread of its own: where nobody reads a pipe, only that thread stops.

What does not fit into its queue is dropped and counted.
"""

import io
import os
import queue
import threading
from collections.abc import Callable

MAX_QUEUED = 4096  # lines, of a few hundred bytes each
EXIT_SECONDS = 1.0


class BackgroundWriter:
    """Writes to one file descriptor; `dropped_line` makes the line that says how many were dropped."""

    def __init__(self, fd: int, dropped_line: Callable[[int], bytes]) -> None:
        self.num_dropped = 0
        self._fd = fd
        self._dropped_line = dropped_line
        self._num_reported = 0  # of those dropped
        self._full = False  # until all that did fit is written, so that one line reports all that did not
        # A finalizer may log while its thread holds the lock; the queue allows that, too.
        self._lock = threading.RLock()
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"writer of fd {fd}")
        self._thread.start()

    def put(self, data: bytes) -> None:
        """Write `data`, soon; never waits."""
        with self._lock:
            if self._full or self._queue.qsize() >= MAX_QUEUED:
                self._full = True
                self.num_dropped += 1
            else:
                self._queue.put(data)

    def close(self) -> None:
        """Write what is queued, if that does not take long."""
        self._queue.put(None)
        self._thread.join(EXIT_SECONDS)

    def _run(self) -> None:
        while (data := self._queue.get()) is not None:
            if not self._write(data):
                with self._lock:
                    self.num_dropped += 1
            if self._queue.empty():
                self._report_dropped()

    def _report_dropped(self) -> None:
        self._full, total = False, self.num_dropped
        if total > self._num_reported and self._write(self._dropped_line(total - self._num_reported)):
            self._num_reported = total

    def _write(self, data: bytes) -> bool:
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError:  # the reader has gone, the disk is full, ...
            return False
        return True


class BackgroundStream(io.RawIOBase):
    """A stream that passes what it gets to a BackgroundWriter."""

    def __init__(self, writer: BackgroundWriter, fd: int) -> None:
        super().__init__()
        self._writer = writer
        self._fd = fd

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def write(self, data: "bytes | bytearray | memoryview") -> int:  # type: ignore[override]
        self._writer.put(bytes(data))
        return len(data)
