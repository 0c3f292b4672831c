"""Log lines on their way to stdout and stderr: queued, so that nobody waits for a reader; repeated ones are counted."""

import io
import logging
import math
import os
import threading
from collections.abc import Callable
from logging.handlers import QueueHandler
from queue import SimpleQueue
from typing import Any

MAX_QUEUED = 4096  # lines, of a few hundred bytes each
EXIT_SECONDS = 1.0
REPEAT_SECONDS = 10.0
MAX_LINES = 1000  # that may repeat
_FORMATTER = logging.Formatter()

FormatRecord = Callable[[logging.LogRecord], str]


class LineQueue(QueueHandler):
    """Formats records where they are logged, for a thread that writes them; drops and counts what does not fit."""

    queue: SimpleQueue[Any]

    def __init__(self, fd: int, format_record: FormatRecord = _FORMATTER.format) -> None:
        super().__init__(SimpleQueue[Any]())  # a finalizer may log during its `put`
        self._format_record = format_record
        self.num_dropped = 0
        self._writer = threading.Thread(target=self._write, args=(fd,), daemon=True, name="log")
        self._writer.start()

    def prepare(self, record: logging.LogRecord) -> bytes:
        """The line of a record."""
        return f"{self._format_record(record)}\n".encode(errors="backslashreplace")

    def enqueue(self, record: Any) -> None:
        """Write a line soon, if it is not empty; never waits."""
        if self.queue.qsize() >= MAX_QUEUED:
            self.num_dropped += 1
        elif record:
            self.queue.put(record)

    def close(self) -> None:
        """Write what is queued, if that does not take long; the interpreter calls it at exit."""
        self.queue.put(None)
        self._writer.join(EXIT_SECONDS)
        super().close()

    def _write(self, fd: int) -> None:
        """Write the lines as they come; where nobody reads a pipe, only this thread stops."""
        for line in iter(self.queue.get, None):
            try:
                while line:
                    line = line[os.write(fd, line) :]
            except OSError:  # the reader has gone, the disk is full, ...
                self.num_dropped += 1


class QueuedStream(io.RawIOBase):
    """A stream whose writes are queued."""

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd
        self.lines = LineQueue(fd)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def write(self, data: "bytes | bytearray | memoryview") -> int:  # type: ignore[override]
        self.lines.enqueue(bytes(data))
        return len(data)


class RepeatedLines:
    """Counts lines that repeat others, which a fault may bring by the thousand."""

    def __init__(self) -> None:
        self._lines: dict[str, tuple[float, int]] = {}  # when each was written, and its repeats since then

    def repeats(self, key: str, now: float) -> int | None:
        """The repeats since a line was written; None if this is one of them, less than ten seconds after it."""
        written, repeats = self._lines.get(key, (-math.inf, 0))
        if now - written < REPEAT_SECONDS:
            self._lines[key] = written, repeats + 1
            return None
        if len(self._lines) >= MAX_LINES:
            self._lines.clear()
        self._lines[key] = now, 0
        return repeats
