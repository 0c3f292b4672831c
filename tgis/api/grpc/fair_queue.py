"""Calls that wait to start, in one queue for each connection: connections take turns."""

import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any

MAX_ARRIVING = 12  # messages at the same time: they are in memory, and nobody has paid for them
ARRIVING_SECONDS = 0.01  # a message that takes longer does not count
PAUSE_SECONDS = 0.008  # a call takes the event loop about a millisecond
BURST_SECONDS = 0.25  # of pauses, saved up for a backlog that is short
PAUSE_SECONDS_PER_BYTE = 3e-8  # a message of 4 MiB takes the event loop about 10 ms
SPARSE_SECONDS = 1.0  # after a sparse call, more are to be expected


class FairQueue:
    """Connections with one call at a time go first, as sparse flows do in fq_codel; the others take turns.

    While there are any of the former, calls of the latter start with pauses between them but for the first few, so that
    they leave most of the event loop's time to the others.
    """

    def __init__(self, max_calls: int, now: Callable[[], float] = time.monotonic) -> None:
        """At most `max_calls` of a connection wait: the oldest are dropped, since the client has cancelled them."""
        self.on_ready: Callable[[], object] = lambda: None  # called when `take` may have a call
        self._max_calls = max_calls
        self._now = now
        self._calls: dict[str, deque[Any]] = {}  # by connection
        self._sparse: deque[str] = deque()  # connections whose only call waits
        self._backlog: deque[str] = deque()  # the others, those whose turn was last at the end
        self._arriving: list[tuple[str, float]] = []  # connections whose message arrives, and since when
        self._last_sparse = -math.inf  # when a message of a connection without a backlog arrived
        self._pause_until = -math.inf

    def __len__(self) -> int:
        """How many connections have calls that wait."""
        return len(self._calls)

    def add(self, connection: str, call: Any) -> None:
        """Append a call to the queue of its connection."""
        if (calls := self._calls.get(connection)) is None:
            calls = self._calls[connection] = deque(maxlen=self._max_calls)
            (self._backlog if self._is_arriving(connection) else self._sparse).append(connection)
        calls.append(call)
        self.on_ready()

    def take(self) -> Any:
        """Take the call whose turn it is; None if none may start."""
        now = self._now()
        self._arriving = [each for each in self._arriving if each[1] > now - ARRIVING_SECONDS]
        if len(self._arriving) >= MAX_ARRIVING:
            return None
        if self._sparse:
            connection = self._sparse.popleft()
        elif self._backlog and (now + BURST_SECONDS >= self._pause_until or now >= self._last_sparse + SPARSE_SECONDS):
            connection = self._backlog.popleft()
            self._pause_until = max(self._pause_until, now) + PAUSE_SECONDS
        else:
            return None
        self._arriving.append((connection, now))
        calls = self._calls[connection]
        call = calls.popleft()
        if calls:
            self._backlog.append(connection)
        else:
            del self._calls[connection]
        return call

    def arrived(self, connection: str, num_bytes: int = 0) -> None:
        """The message of one of the connection's calls is there, or never will be."""
        now = self._now()
        for index, (arriving, _) in enumerate(self._arriving):
            if arriving == connection:
                del self._arriving[index]
                break
        if connection in self._calls:
            self._pause_until = max(self._pause_until, now) + PAUSE_SECONDS_PER_BYTE * num_bytes
        elif not self._is_arriving(connection):
            self._last_sparse = now
        self.on_ready()

    def clear(self) -> None:
        """Drop all calls, which cancels them."""
        self._calls.clear()
        self._sparse.clear()
        self._backlog.clear()

    def _is_arriving(self, connection: str) -> bool:
        return connection in [arriving for arriving, _ in self._arriving]
