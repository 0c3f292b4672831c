"""What needs private parts of grpcio: turns between connections, and one wake-up of the event loop for many events.

Each has a plain fallback, the public server and uvloop's own loop, where a version of grpcio lacks a name.
"""

import asyncio
import functools
import logging
import socket
import weakref
from collections.abc import Callable, Coroutine, Sequence
from contextvars import Context, ContextVar
from typing import Any, TypeVar

import grpc
import uvloop
from grpc._cython import cygrpc  # type: ignore[attr-defined]  # has no stubs

from tgis.api.grpc.fair_queue import PAUSE_SECONDS, FairQueue

T = TypeVar("T")

log = logging.getLogger(__name__)

NUM_ACCEPTS = 64  # calls that an iteration of the event loop takes from C-core
_MAX_WAKE_UPS = 1 << 16  # more than the buffer can have
_NAMES, _METHOD = ("AioServer", "_ServicerContext", "_RequestCallError"), "_request_call"
_AioServer: Any = getattr(cygrpc, "AioServer", object)


def make_server(
    handlers: "Sequence[grpc.GenericRpcHandler[Any, Any]]",
    options: Sequence[tuple[str, int]],
    queue: FairQueue,
) -> grpc.aio.Server:
    """A server that takes calls from its connections in turns; create it inside the event loop.

    C-core queues the calls of all connections in the order of their arrival, and grpc.aio takes one of them every few
    iterations of the event loop: behind clients that flood the server, calls of others would wait for seconds.
    """
    _remember_creators(asyncio.get_running_loop())
    logging.getLogger(cygrpc.__name__).addFilter(_is_failure)
    server = grpc.aio.server(handlers=handlers, options=options)
    if hasattr(server, "_server") and all(hasattr(cygrpc, name) for name in _NAMES) and hasattr(_AioServer, _METHOD):
        server._server = FairServer(handlers, options, queue)
    else:
        log.warning("grpcio %s has changed: calls start in the order of their arrival", grpc.__version__)
    return server


def _is_failure(record: logging.LogRecord) -> bool:
    """Whether an error that grpc.aio logs is one: a client that leaves while its answer is sent is none."""
    if isinstance(record.exc_info and record.exc_info[1], grpc.aio.InternalError):  # of a batch of C-core's
        log.info("the client disconnected while the response was sent")
        return False
    return True


creator: "ContextVar[weakref.ref[asyncio.Task[Any]] | None]" = ContextVar("creator", default=None)


def _remember_creators(loop: asyncio.AbstractEventLoop) -> None:
    """Let each task of the loop know which one has created it; `GrpcCall.end` needs it of the tasks of grpc.aio."""

    def create(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T], **options: Any) -> asyncio.Task[T]:
        task = asyncio.current_task(loop)
        creator.set(None if task is None else weakref.ref(task))
        return asyncio.Task(coroutine, loop=loop, **options)

    loop.set_task_factory(create)  # type: ignore[arg-type]


class _NextCall(asyncio.Future[Any]):
    """A future that runs its callback synchronously, so that grpc.aio can start several calls in an iteration."""

    _callback: Callable[["_NextCall"], object] | None = None

    def add_done_callback(self, callback: Callable[[Any], object], *, context: Context | None = None) -> None:
        if context is not None:  # a task, which cannot wake inside another: grpc.aio before 1.80 awaits the future
            super().add_done_callback(callback, context=context)
            return
        self._callback = callback
        if self.done():
            callback(self)

    def finish(self, call: Any, error: Exception | None = None) -> None:
        if error is None:
            self.set_result(call)
        else:
            self.set_exception(error)
        if self._callback is not None:
            self._callback(self)


class FairServer(_AioServer):  # type: ignore[misc]
    """What `grpc.aio.server` wraps; grpc.aio asks it for one call after the other."""

    def __init__(self, handlers: Any, options: Any, queue: FairQueue) -> None:
        self._event_loop = asyncio.get_running_loop()
        super().__init__(self._event_loop, None, handlers, (), options, None)
        self._queue = queue
        self._accepts: list[asyncio.Task[None]] = []
        self._accepting, self._stopped = True, False
        self._next: _NextCall | None = None  # while grpc.aio waits for it
        self._retry: asyncio.TimerHandle | None = None
        queue.on_ready = self._offer

    async def _request_call(self) -> Any:
        """Called by grpc.aio before 1.80."""
        return await self._make_request_call_future()

    def _make_request_call_future(self, _method: bytes | None = None) -> "asyncio.Future[Any]":
        if not self._accepts:
            self._accepts = [self._event_loop.create_task(self._accept_calls()) for _ in range(NUM_ACCEPTS)]
        next_call = self._next = _NextCall(loop=self._event_loop)
        self._offer()
        return next_call

    def _offer(self) -> None:
        """Give grpc.aio the call that it waits for, if one may start."""
        if self._next is None or self._next.done():
            return
        if self._stopped:
            self._next.finish(None, cygrpc._RequestCallError())  # what grpc.aio expects of a server that stops
        elif (call := self._queue.take()) is not None:
            waiting, self._next = self._next, None  # who holds a call keeps it open
            waiting.finish(call)
        elif self._queue and self._retry is None:
            self._retry = self._event_loop.call_later(PAUSE_SECONDS, self._retry_now)

    def _retry_now(self) -> None:
        self._retry = None
        self._offer()

    async def shutdown(self, grace: float | None) -> None:
        """Stop; C-core crashes if it is asked for a call of a server that it has destroyed."""
        self._accepting = False
        await super().shutdown(grace)

    async def _accept_calls(self) -> None:
        try:
            while self._accepting:
                self._accepted(await super()._request_call())  # in no variable: who holds a call keeps it open
        except cygrpc._RequestCallError:
            pass
        except Exception:
            log.exception("one call fewer at a time is taken from C-core")
            return
        self._stopped = True
        self._queue.clear()
        self._event_loop.call_soon(self._offer)

    def _accepted(self, call: Any) -> None:
        self._queue.add(cygrpc._ServicerContext(call, None, None, self._event_loop).peer(), call)


class EventLoop(uvloop.Loop):
    """uvloop's, which takes all wake-ups of gRPC at once.

    A thread of gRPC sends the loop a byte for each event. The loop handles all events each time it is woken, but reads
    one byte: of a few hundred events at once each would wake it again. Worse, the buffer of these bytes is then full,
    the thread waits for room in it, and from then on an iteration of the loop gets one event.
    """

    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:  # type: ignore[override]
        handler = getattr(callback, "func", None)
        if type(getattr(handler, "__self__", None)).__name__ == "PollerCompletionQueue":  # of grpc.aio
            callback = functools.partial(_handle_all, fd, callback)
        super().add_reader(fd, callback, *args)


def _handle_all(wake_ups: socket.socket, handle: Callable[[], None]) -> None:
    try:
        num_unread = len(wake_ups.recv(_MAX_WAKE_UPS, socket.MSG_PEEK))
    except BlockingIOError:  # it has been woken for what it has handled already
        return
    handle()  # reads one; if that raises, the others wake the loop for the events that are left
    if num_unread > 1:
        wake_ups.recv(num_unread - 1)


def run(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` with this loop."""
    with asyncio.Runner(loop_factory=EventLoop) as runner:
        return runner.run(main)
