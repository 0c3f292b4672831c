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
from collections.abc import Callable, Container, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from grpc._cython import cygrpc  # type: ignore[attr-defined]  # has no stubs

from tgis.api.grpc.open_calls import ARRIVING_SECONDS, MAX_ARRIVING, OpenCalls

if TYPE_CHECKING:
    import grpc

T = TypeVar("T")

log = logging.getLogger(__name__)

NUM_ACCEPTS = 64  # calls that an iteration of the event loop takes from C-core
MAX_STARTS = 8  # of calls that it starts
MAX_ARRIVING_TOGETHER = 4  # messages; beyond, only one of a connection
MAX_WAIT_SECONDS = 10.0  # for the turn of a call: only those of a connection that floods the server wait for long
_MAX_SKIPPED = 64  # connections


class FairServer(cygrpc.AioServer):  # type: ignore[misc]  # has no stubs
    """What `grpc.aio.server` wraps; grpc.aio asks it for one call after the other.

    Calls of connections that have none waiting start at once, several in an iteration of the event loop; of the others,
    one in some iterations.
    """

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
        calls.on_arrived = self._offer
        self._accepts: list[asyncio.Task[None]] = []
        self._next: _NextCall | None = None  # while grpc.aio waits for it
        self._retry: asyncio.TimerHandle | None = None
        self._started: list[str] = []  # connections whose calls have started in this iteration of the event loop
        self._starting: list[str] = []  # and in the one before: their handlers do not run yet

    def _make_request_call_future(self, _method: bytes | None) -> "asyncio.Future[Any]":
        """In grpc.aio 1.80 and later."""
        return self._next_call()

    async def _request_call(self) -> Any:
        """In earlier ones."""
        done, _ = await asyncio.wait([self._next_call()])
        return done.pop().result()

    def _next_call(self) -> "_NextCall":
        if not self._accepts:
            self._accepts = [self._running_loop.create_task(self._accept_calls()) for _ in range(NUM_ACCEPTS)]
        next_call = self._next = _NextCall(loop=self._running_loop)
        if self._accepts[0].done():
            self._stop()
        else:
            self._offer()
        return next_call

    def _offer(self) -> None:
        """Give grpc.aio the call that it waits for, if one may start."""
        if self._next is not None and (call := self._take()) is not None:
            waiting, self._next = self._next, None  # who holds a call keeps it open
            waiting.finish(call)

    def _take(self) -> Any:
        """The next call, None if none may start."""
        if not self._turns:
            return None
        taken = None
        if len(self._started) < MAX_STARTS and (busy := self._busy()) is not None:
            taken = self._turns.take(time.monotonic(), busy, only_new=bool(self._started))
        if taken is None:
            self._retry_later()
            return None
        connection, call = taken
        if not (self._started or self._starting):
            self._running_loop.call_soon(self._next_iteration)
        self._started.append(connection)
        return call

    def _busy(self) -> Container[str] | None:
        """Connections that have to wait, None for all: what a call sends may be large."""
        connections = [*self._open_calls.arriving_from(), *self._started, *self._starting]
        large = self._open_calls.large_senders
        if len(connections) >= MAX_ARRIVING:
            return None
        busy = set(connections) if len(connections) >= MAX_ARRIVING_TOGETHER else set()
        if not large.keys().isdisjoint(connections):  # one large message at a time, as far as that is known
            busy |= large.keys()
        return busy

    def _next_iteration(self) -> None:
        self._starting, self._started = self._started, []
        if self._starting:
            self._running_loop.call_soon(self._next_iteration)
        self._offer()

    def _retry_later(self) -> None:
        """When messages that arrive may have become slow ones."""
        if self._retry is None:
            self._retry = self._running_loop.call_later(ARRIVING_SECONDS, self._retry_now)

    def _retry_now(self) -> None:
        self._retry = None
        self._offer()

    async def _accept_calls(self) -> None:
        try:
            while True:
                self._accepted(await super()._request_call())  # in no variable: who holds a call keeps it open
        except cygrpc._RequestCallError:  # the server stops
            self._turns.clear()
            self._stop()
        except Exception:
            log.exception("one call fewer at a time is taken from C-core")

    def _accepted(self, call: Any) -> None:
        connection = cygrpc._ServicerContext(call, None, None, self._running_loop).peer()
        self._turns.add(connection, call, time.monotonic())
        self._offer()

    def _stop(self) -> None:
        """Raise what grpc.aio expects then."""
        if self._next is not None:
            waiting, self._next = self._next, None
            waiting.finish(error=cygrpc._RequestCallError())


class _NextCall(asyncio.Future[Any]):
    """For `asyncio.wait`, which hears of the call at once: of other futures an iteration of the event loop later."""

    _callback: Callable[["_NextCall"], object] | None = None

    def add_done_callback(self, callback: Callable[["_NextCall"], object], **_context: object) -> None:
        self._callback = callback
        if self.done():
            callback(self)

    def finish(self, call: Any = None, error: Exception | None = None) -> None:
        if self.done():  # cancelled
            return
        if error is None:
            self.set_result(call)
        else:
            self.set_exception(error)
        if self._callback is not None:
            self._callback(self)


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

    def take(self, now: float, busy: Container[str] = (), *, only_new: bool = False) -> tuple[str, T] | None:
        """The next one of a connection that is not busy; another time looks further than at the first of them."""
        for turns in (self._new,) if only_new else (self._new, self._old):
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
                    return connection, calls.popleft()[1]
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
