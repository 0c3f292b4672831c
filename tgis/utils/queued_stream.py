"""A text stream that never waits for its reader."""

import io
import os
import threading
from queue import SimpleQueue

# A line has a few hundred bytes.
MAX_QUEUED = 4096
STOP_SECONDS = 1.0


class QueuedStream(io.TextIOBase):
    """A thread writes what is queued to the descriptor; what does not fit into the queue is dropped and counted.

    QueueListener would wait for a blocked reader when it stops, and a queue.Queue could deadlock: its lock is not
    reentrant, and a finalizer may log while its thread logs.
    """

    def __init__(self, fd: int) -> None:
        super().__init__()
        self.num_dropped = 0
        self._fd = fd
        self._queue = SimpleQueue[str | None]()
        self._thread = threading.Thread(target=self._write_queued, daemon=True, name="log")
        self._thread.start()

    def write(self, text: str) -> int:
        if self._queue.qsize() < MAX_QUEUED:
            self._queue.put(text)
        else:
            self.num_dropped += 1
        return len(text)

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def stop(self) -> None:
        """Write what is queued, for a second at most."""
        self._queue.put(None)
        self._thread.join(STOP_SECONDS)

    def _write_queued(self) -> None:
        for text in iter(self._queue.get, None):
            data = text.encode(errors="backslashreplace")
            try:
                while data:
                    data = data[os.write(self._fd, data) :]
            except OSError:  # the reader has gone, the disk is full, ...
                self.num_dropped += 1
