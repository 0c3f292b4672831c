"""A grpc.aio server that takes calls from its connections in turns.

C-core queues the calls of all connections in the order of their arrival, those cancelled meanwhile included, and
grpc.aio takes one of them every few iterations of the event loop: behind clients that flood the server, calls of
others would wait for seconds. This server takes many at a time out of that queue, and has them wait for each
connection by itself.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from grpc._cython import cygrpc  # type: ignore[attr-defined]  # has no stubs

from tgis.api.grpc.open_calls import ARRIVING_SECONDS, MAX_ARRIVING, OpenCalls

if TYPE_CHECKING:
    import grpc

T = TypeVar("T")

log = logging.getLogger(__name__)

NUM_ACCEPTS = 64  # calls that an iteration of the event loop takes from C-core
MAX_ARRIVING_TOGETHER = 4  # messages; beyond, only one of a connection
MAX_WAIT_SECONDS = 10.0  # for the turn of a call: only those of a connection that floods the server wait for long
_MAX_SKIPPED = 64  # connections


class FairServer(cygrpc.AioServer):  # type: ignore[misc]  # has no stubs
    """What `grpc.aio.server` wraps; grpc.aio asks it for the next call by `_request_call`."""

    def __init__(
        self,
        handlers: Sequence["grpc.GenericRpcHandler[Any, Any]"],
        interceptors: "Sequence[grpc.aio.ServerInterceptor[Any, Any]]",
        options: Sequence[tuple[str, int]],
        calls: OpenCalls,
    ) -> None:
        self._running_loop = asyncio.get_running_loop()
        super().__init__(self._running_loop, None, handlers, interceptors, options, None)
        self._turns = ConnectionTurns[Any]()
        self._open_calls = calls
        self._changed = calls.changed
        self._accepts: list[asyncio.Task[None]] = []

    async def _request_call(self) -> Any:
        if not self._accepts:
            self._accepts = [self._running_loop.create_task(self._accept_calls()) for _ in range(NUM_ACCEPTS)]
        while (call := self._take()) is None:
            if self._accepts[0].done():
                return await super()._request_call()  # raises what grpc.aio expects when a server stops
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ARRIVING_SECONDS if self._turns else None):
                    await self._changed.wait()
        return call

    def _take(self) -> Any:
        """The next call, None if none may start: what it sends may be large."""
        connections, large = self._open_calls.arriving_from(), self._open_calls.large_senders
        if len(connections) >= MAX_ARRIVING:
            return None
        busy = set(connections) if len(connections) >= MAX_ARRIVING_TOGETHER else set()
        if not large.keys().isdisjoint(connections):  # one large message at a time, as far as that is known
            busy |= large.keys()
        return self._turns.take(time.monotonic(), busy)

    async def _accept_calls(self) -> None:
        try:
            while True:
                self._accepted(await super()._request_call())  # in no variable: who holds a call keeps it open
        except cygrpc._RequestCallError:  # the server stops
            self._turns.clear()
            self._changed.set()
        except Exception:
            log.exception("one call fewer at a time is taken from C-core")

    def _accepted(self, call: Any) -> None:
        connection = cygrpc._ServicerContext(call, None, None, self._running_loop).peer()
        self._turns.add(connection, call, time.monotonic())
        self._changed.set()


class ConnectionTurns(Generic[T]):
    """Calls that wait, by connection: those with new calls first, then one of each in turns, as fq_codel does.

    How many calls a connection has in here, C-core limits. Those that have waited for too long are dropped, which
    cancels them: most have been cancelled by their clients.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, deque[tuple[float, T]]] = {}  # since when, the oldest first
        self._new: deque[str] = deque()
        self._old: deque[str] = deque()

    def __len__(self) -> int:
        """How many connections have had calls since their last turn."""
        return len(self._waiting)

    def add(self, connection: str, call: T, now: float) -> None:
        """At the end of what waits from this connection."""
        if connection not in self._waiting:
            self._waiting[connection] = deque()
            self._new.append(connection)
        self._waiting[connection].append((now, call))

    def take(self, now: float, busy: Container[str] = ()) -> T | None:
        """The next one of a connection that is not busy; another time looks further than at the first of them."""
        for turns in (self._new, self._old):
            skipped: list[str] = []
            while turns and len(skipped) < _MAX_SKIPPED:
                connection = turns.popleft()
                calls = self._waiting[connection]
                self._drop_late(calls, now - MAX_WAIT_SECONDS)
                if not calls:
                    del self._waiting[connection]
                elif connection in busy:
                    skipped.append(connection)
                else:
                    turns.extend(skipped)
                    self._old.append(connection)  # without calls too: it is new again only after its turn
                    return calls.popleft()[1]
            turns.extend(skipped)
        return None

    def clear(self) -> None:
        """Drop all."""
        for waiting in (self._waiting, self._new, self._old):
            waiting.clear()

    def _drop_late(self, calls: deque[tuple[float, T]], before: float) -> None:
        num_dropped = 0
        while calls and calls[0][0] < before:
            calls.popleft()
            num_dropped += 1
        if num_dropped:
            log.warning(
                "dropped %d calls of a connection that waited for more than %g s", num_dropped, MAX_WAIT_SECONDS
            )
