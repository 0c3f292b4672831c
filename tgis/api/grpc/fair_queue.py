"""Calls that wait to start, in one queue for each connection: connections take turns."""

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

log = logging.getLogger(__name__)

MAX_ARRIVING = 12  # messages at the same time: they are in memory, and nobody has paid for them
ARRIVING_SECONDS = 0.01  # a message that takes longer keeps no other from its turn


class FairQueue(Generic[T]):
    """A connection's next call starts when the message of the one before has arrived, or is late."""

    def __init__(self, max_calls: int, now: Callable[[], float] = time.monotonic) -> None:
        """At most `max_calls` of a connection wait: the oldest are dropped, since the client has cancelled them."""
        self.on_ready: Callable[[], object] = lambda: None  # called when `take` may have a call
        self._max_calls = max_calls
        self._now = now
        self._calls: dict[str, deque[T]] = {}  # by connection
        self._turns: deque[str] = deque()  # connections with calls of which none is arriving
        self._arriving: dict[str, float] = {}  # since when, the oldest first

    def __len__(self) -> int:
        """How many connections have calls that wait."""
        return len(self._calls)

    def add(self, connection: str, call: T) -> None:
        """Append a call to the queue of its connection."""
        if (calls := self._calls.get(connection)) is None:
            calls = self._calls[connection] = deque(maxlen=self._max_calls)
            if connection not in self._arriving:
                self._turns.append(connection)
        if len(calls) == self._max_calls:
            log.debug("dropped the oldest call of a connection: %d others of it wait", self._max_calls)
        calls.append(call)
        self.on_ready()

    def take(self) -> T | None:
        """Take the call whose turn it is, if one may start."""
        self._forget_late()
        if not self._turns or len(self._arriving) >= MAX_ARRIVING:
            return None
        connection = self._turns.popleft()
        calls = self._calls[connection]
        self._arriving[connection] = self._now()
        call = calls.popleft()
        if not calls:
            del self._calls[connection]
        return call

    def arrived(self, connection: str) -> None:
        """The message of the connection's last call is there, or never will be."""
        if self._arriving.pop(connection, None) is None:
            return
        if connection in self._calls:
            self._turns.append(connection)
        self.on_ready()

    def clear(self) -> None:
        """Drop all calls, which cancels them."""
        self._calls.clear()
        self._turns.clear()

    def _forget_late(self) -> None:
        late = self._now() - ARRIVING_SECONDS
        while self._arriving and next(iter(self._arriving.values())) <= late:
            connection = next(iter(self._arriving))
            del self._arriving[connection]
            if connection in self._calls:
                self._turns.append(connection)
