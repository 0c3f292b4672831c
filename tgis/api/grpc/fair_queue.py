"""Calls that wait to start, in one queue for each connection: connections take turns."""

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

log = logging.getLogger(__name__)

MAX_ARRIVING = 12  # messages at the same time: they are in memory, and nobody has paid for them
ARRIVING_SECONDS = 0.01  # a message that takes longer keeps no other from its turn
PAUSE_SECONDS = 0.004  # a call takes the event loop about a millisecond
PAUSE_SECONDS_PER_BYTE = 1e-8  # a message of 4 MiB about ten
SPARSE_SECONDS = 1.0  # after a sparse call, more are to be expected


class FairQueue(Generic[T]):
    """A connection's next call starts when the message of the one before has arrived, or is late.

    Connections with one call at a time go first, as sparse flows do in fq_codel. While there are any, calls of those
    with a backlog start with pauses between them, so that they leave most of the event loop's time to the others.
    """

    def __init__(self, max_calls: int, now: Callable[[], float] = time.monotonic) -> None:
        """At most `max_calls` of a connection wait: the oldest are dropped, since the client has cancelled them."""
        self.on_ready: Callable[[], object] = lambda: None  # called when `take` may have a call
        self._max_calls = max_calls
        self._now = now
        self._calls: dict[str, deque[T]] = {}  # by connection
        self._sparse: deque[str] = deque()  # connections whose first call waits
        self._backlog: deque[str] = deque()  # connections that had calls waiting when their last message arrived
        self._arriving: dict[str, float] = {}  # since when, the oldest first
        self._last_sparse = -math.inf
        self._pause_until = -math.inf

    def __len__(self) -> int:
        """How many connections have calls that wait."""
        return len(self._calls)

    def add(self, connection: str, call: T) -> None:
        """Append a call to the queue of its connection."""
        if (calls := self._calls.get(connection)) is None:
            calls = self._calls[connection] = deque(maxlen=self._max_calls)
            if connection not in self._arriving:
                self._sparse.append(connection)
        if len(calls) == self._max_calls:
            log.debug("dropped the oldest call of a connection: %d others of it wait", self._max_calls)
        calls.append(call)
        self.on_ready()

    def take(self) -> T | None:
        """Take the call whose turn it is, if one may start."""
        now = self._now()
        self._forget_late(now)
        if len(self._arriving) >= MAX_ARRIVING:
            return None
        if self._sparse:
            connection = self._sparse.popleft()
            self._last_sparse = now
        elif self._backlog and (now >= self._pause_until or now >= self._last_sparse + SPARSE_SECONDS):
            connection = self._backlog.popleft()
            self._pause_until = now + PAUSE_SECONDS
        else:
            return None
        calls = self._calls[connection]
        self._arriving[connection] = now
        call = calls.popleft()
        if not calls:
            del self._calls[connection]
        return call

    def arrived(self, connection: str, num_bytes: int = 0) -> None:
        """The message of the connection's last call is there, or never will be."""
        self._pause_until += PAUSE_SECONDS_PER_BYTE * num_bytes
        if self._arriving.pop(connection, None) is None:
            return
        if connection in self._calls:
            self._backlog.append(connection)
        self.on_ready()

    def clear(self) -> None:
        """Drop all calls, which cancels them."""
        self._calls.clear()
        self._sparse.clear()
        self._backlog.clear()

    def _forget_late(self, now: float) -> None:
        while self._arriving and next(iter(self._arriving.values())) <= now - ARRIVING_SECONDS:
            connection = next(iter(self._arriving))
            del self._arriving[connection]
            if connection in self._calls:
                self._backlog.append(connection)
