"""Log lines on their way to stdout and stderr: queued, so that nobody waits for a reader; repeated ones are counted."""

import copy
import io
import logging
import os
import threading
import time
from collections import Counter
from logging.handlers import QueueHandler, QueueListener
from queue import SimpleQueue
from typing import Any

MAX_QUEUED = 4096  # lines, of a few hundred bytes each
EXIT_SECONDS = 1.0
REPEAT_SECONDS = 10.0
MAX_LINES = 1000  # that may repeat

_log = logging.getLogger(__name__)


class LineQueue(QueueHandler):
    """Formats records where they are logged, for a thread that writes them; drops and counts what does not fit."""

    queue: SimpleQueue[Any]

    def __init__(self, fd: int, formatter: logging.Formatter | None = None) -> None:
        super().__init__(SimpleQueue[Any]())  # a finalizer may log during its `put`
        self.setFormatter(formatter)
        self.num_dropped = 0
        self.num_unreported = 0  # of those dropped because they did not fit
        self.counting = threading.RLock()
        self._finished = threading.Event()
        self._writer = _Writer(fd, self)
        self._writer.start()

    def prepare(self, record: logging.LogRecord) -> bytes:
        """The line of a record."""
        return f"{self.format(record)}\n".encode(errors="backslashreplace")

    def enqueue(self, record: Any) -> None:
        """Write a line soon; never waits. After one was dropped all are, until the writer has caught up."""
        with self.counting:
            if self.num_unreported or self.queue.qsize() >= MAX_QUEUED:
                self.num_dropped += 1
                self.num_unreported += 1
            else:
                self.queue.put(record)

    def close(self) -> None:
        """Write what is queued, if that does not take long; the interpreter calls it at exit."""
        self.queue.put(self._finished)
        self._writer.enqueue_sentinel()
        self._finished.wait(EXIT_SECONDS)
        super().close()


class _Writer(QueueListener):
    """Writes the lines of a queue: where nobody reads a pipe, only its thread stops."""

    queue: SimpleQueue[Any]

    def __init__(self, fd: int, lines: LineQueue) -> None:
        super().__init__(lines.queue)
        self._fd = fd
        self._lines = lines

    def handle(self, record: Any) -> None:
        """Write a line, or set the event that stands for the end."""
        if isinstance(record, threading.Event):
            record.set()
            return
        try:
            while record:
                record = record[os.write(self._fd, record) :]
        except OSError:  # the reader has gone, the disk is full, ...
            with self._lines.counting:
                self._lines.num_dropped += 1
        if self.queue.empty():
            self._report_dropped()

    def _report_dropped(self) -> None:
        with self._lines.counting:
            count, self._lines.num_unreported = self._lines.num_unreported, 0
        if count:
            _log.warning("%d lines were dropped: they came faster than they were read", count)


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
    """Counts records that repeat others, which a fault may bring by the thousand."""

    def __init__(self) -> None:
        self._since = 0.0
        self._records: dict[str, logging.LogRecord] = {}  # of about the last ten seconds
        self._repeats: Counter[str] = Counter()

    def is_repeat(self, record: logging.LogRecord, key: str) -> bool:
        """Count a record, and return true if there was one with this key in the last ten seconds."""
        if key in self._records:
            self._repeats[key] += 1
            return True
        if len(self._records) < MAX_LINES:
            kept = copy.copy(record)  # without what arguments and the frames of a traceback hold in memory
            kept.msg, kept.args, kept.exc_info = record.getMessage(), None, None
            self._records[key] = kept
        return False

    def due(self, now: float) -> list[logging.LogRecord]:
        """Every ten seconds the records that were repeated; `repeated` in each says how often. `now` is any clock."""
        if now - self._since < REPEAT_SECONDS:
            return []
        repeats, self._since, self._repeats = self._repeats, now, Counter()
        self._records = {key: copy.copy(self._records[key]) for key in repeats}
        for key, record in self._records.items():
            vars(record).update(created=time.time(), correlation_id=None, repeated=repeats[key])
        return list(self._records.values())
