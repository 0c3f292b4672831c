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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from grpc._cython import cygrpc  # type: ignore[attr-defined]  # has no stubs

from tgis.api.grpc.open_calls import ARRIVING_SECONDS, MAX_ARRIVING, OpenCalls

if TYPE_CHECKING:
    import grpc

T = TypeVar("T")

log = logging.getLogger(__name__)

NUM_ACCEPTS = 64  # calls that an iteration of the event loop takes from C-core
MAX_STARTS = 8  # of calls that it starts
PAUSE = 16  # iterations, between calls of connections with a backlog: each call takes some ten of them
MAX_ARRIVING_TOGETHER = 4  # messages; beyond, only one of a connection
MAX_ARRIVING_SLOWLY = MAX_ARRIVING // 2  # of connections whose messages arrive slowly
MAX_WAIT_SECONDS = 10.0  # for the turn of a call: only those of a connection that floods the server wait for long
_MAX_SKIPPED = 64  # connections


class FairServer(cygrpc.AioServer):  # type: ignore[misc]  # has no stubs
    """What `grpc.aio.server` wraps; grpc.aio asks it for one call after the other.

    Calls of connections that have none waiting start at once, several in an iteration of the event loop. Of connections
    with a backlog, one starts in some iterations: few such calls are under way at a time, so iterations are short, and
    who needs several of them does not wait for long. That costs little throughput, as an iteration with little to do is
    over soon.
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
        self._turns = ConnectionTurns[Any](calls.max_of_connection)
        self._open_calls = calls
        calls.on_arrived = self._offer
        self._accepts: list[asyncio.Task[None]] = []
        self._next: _NextCall | None = None  # while grpc.aio waits for it
        self._retry: asyncio.TimerHandle | None = None
        self._started: list[str] = []  # connections whose calls have started in this iteration of the event loop
        self._starting: list[str] = []  # and in the one before: their handlers do not run yet
        self._pause = 0  # iterations until a connection with a backlog has its turn

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
            only_new, backlog = bool(self._started), not self._pause
            taken = self._turns.take(time.monotonic(), busy, only_new=only_new, backlog=backlog)
        if taken is None:
            self._retry_later()
            return None
        if not (self._started or self._starting or self._pause):
            self._running_loop.call_soon(self._next_iteration)
        if taken.backlog:
            self._pause = PAUSE
        self._started.append(taken.connection)
        return taken.call

    def _busy(self) -> Container[str] | None:
        """Connections that have to wait, None for all: what a call sends may be large."""
        connections = [*self._open_calls.arriving_from(), *self._started, *self._starting]
        large, slow = self._open_calls.large_senders, self._open_calls.slow_senders
        if len(connections) >= MAX_ARRIVING:
            return None
        busy = set(connections) if len(connections) >= MAX_ARRIVING_TOGETHER else set()
        if sum(connection in slow for connection in connections) >= MAX_ARRIVING_SLOWLY:
            busy |= slow
        if not large.keys().isdisjoint(connections):  # one large message at a time, as far as that is known
            busy |= large.keys()
        return busy

    def _next_iteration(self) -> None:
        self._starting, self._started = self._started, []
        self._pause = max(self._pause - 1, 0)
        if self._starting or self._pause:
            self._running_loop.call_soon(self._next_iteration)
        if self._starting or not self._pause:
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


@dataclass(frozen=True, slots=True)
class Turn(Generic[T]):
    """A call that may start."""

    connection: str
    call: T
    backlog: bool  # it is of a connection that had more calls waiting at its last turn


class ConnectionTurns(Generic[T]):
    """Calls that wait, by connection. Connections take turns, one call each: new ones go first, as in fq_codel.

    Calls that have waited for too long are dropped, which cancels them: most have been cancelled by their clients. So
    are the oldest of a connection with more than `max_calls`: it may have so many open, and has cancelled the others.
    """

    def __init__(self, max_calls: int) -> None:
        self._max_calls = max_calls
        self._waiting: dict[str, deque[tuple[float, T]]] = {}  # since when, the oldest first
        self._new: deque[str] = deque()
        self._idle: deque[str] = deque()  # had no more calls at their last turn
        self._backlog: deque[str] = deque()

    def __len__(self) -> int:
        """How many connections have had calls since their last turn."""
        return len(self._waiting)

    def add(self, connection: str, call: T, now: float) -> None:
        """At the end of what waits from this connection."""
        if (calls := self._waiting.get(connection)) is None:
            calls = self._waiting[connection] = deque(maxlen=self._max_calls)
            self._new.append(connection)
        if len(calls) == self._max_calls:
            log.warning("dropped the oldest call of a connection: %d others of it wait", self._max_calls)
        calls.append((now, call))

    def take(
        self, now: float, busy: Container[str] = (), *, only_new: bool = False, backlog: bool = True
    ) -> Turn[T] | None:
        """The next one of a connection that is not busy; another time looks further than at the first of them.

        Those with a backlog go before others that are not new, or not at all.
        """
        for turns in (self._new,) if only_new else (self._new, *[self._backlog] * backlog, self._idle):
            if (connection := self._next_connection(turns, now, busy)) is not None:
                calls = self._waiting[connection]
                _, call = calls.popleft()
                # Without calls too: it is new again only after its turn.
                (self._backlog if calls else self._idle).append(connection)
                return Turn(connection, call, turns is self._backlog)
        return None

    def _next_connection(self, turns: deque[str], now: float, busy: Container[str]) -> str | None:
        skipped: list[str] = []
        found = None
        while turns and found is None and len(skipped) < _MAX_SKIPPED:
            connection = turns.popleft()
            calls = self._waiting[connection]
            self._drop_late(calls, now - MAX_WAIT_SECONDS)
            if not calls:
                del self._waiting[connection]
            elif connection in busy:
                skipped.append(connection)
            else:
                found = connection
        turns.extend(skipped)
        return found

    def clear(self) -> None:
        """Drop all."""
        for waiting in (self._waiting, self._new, self._idle, self._backlog):
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
