"""A grpc.aio server that takes calls from its connections in turns.

C-core queues the calls of all connections in the order of their arrival, those cancelled meanwhile included, and
grpc.aio takes one of them every few iterations of the event loop: behind clients that flood the server, calls of
others would wait for seconds. This server takes many at a time out of that queue, and has them wait for each
connection by itself.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from grpc._cython import cygrpc  # type: ignore[attr-defined]  # has no stubs

if TYPE_CHECKING:
    import grpc

T = TypeVar("T")

log = logging.getLogger(__name__)

NUM_ACCEPTS = 64  # calls that an iteration of the event loop takes from C-core
MAX_WAIT_SECONDS = 10.0  # for the turn of a call: only those of a connection that floods the server wait for long


class FairServer(cygrpc.AioServer):  # type: ignore[misc]  # has no stubs
    """What `grpc.aio.server` wraps; grpc.aio asks it for the next call by `_request_call`."""

    def __init__(
        self,
        handlers: Sequence["grpc.GenericRpcHandler[Any, Any]"],
        interceptors: "Sequence[grpc.aio.ServerInterceptor[Any, Any]]",
        options: Sequence[tuple[str, int]],
    ) -> None:
        self._running_loop = asyncio.get_running_loop()
        super().__init__(self._running_loop, None, handlers, interceptors, options, None)
        self._calls = ConnectionTurns[Any]()
        self._changed = asyncio.Event()
        self._accepts: list[asyncio.Task[None]] = []

    async def _request_call(self) -> Any:
        if not self._accepts:
            self._accepts = [self._running_loop.create_task(self._accept_calls()) for _ in range(NUM_ACCEPTS)]
        while (call := self._calls.take(time.monotonic())) is None:
            if self._accepts[0].done():
                return await super()._request_call()  # raises what grpc.aio expects when a server stops
            self._changed.clear()
            await self._changed.wait()
        return call

    async def _accept_calls(self) -> None:
        try:
            while True:
                self._accepted(await super()._request_call())  # in no variable: who holds a call keeps it open
        except cygrpc._RequestCallError:  # the server stops
            self._calls.clear()
            self._changed.set()

    def _accepted(self, call: Any) -> None:
        connection = cygrpc._ServicerContext(call, None, None, self._running_loop).peer()
        self._calls.add(connection, call, time.monotonic())
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

    def add(self, connection: str, call: T, now: float) -> None:
        """At the end of what waits from this connection."""
        if connection not in self._waiting:
            self._waiting[connection] = deque()
            self._new.append(connection)
        self._waiting[connection].append((now, call))

    def take(self, now: float) -> T | None:
        """The next one."""
        while turns := self._new or self._old:
            connection = turns.popleft()
            calls = self._waiting[connection]
            self._drop_late(calls, now - MAX_WAIT_SECONDS)
            if calls:
                self._old.append(connection)  # without calls too: it is new again only after its turn
                return calls.popleft()[1]
            del self._waiting[connection]
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
