"""The event loop of processes with many gRPC calls."""

import asyncio
import functools
import socket
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import uvloop
from grpc._cython import cygrpc  # type: ignore[attr-defined]  # has no stubs

T = TypeVar("T")

_MAX_WAKE_UPS = 1 << 16  # more than the buffer can have


class EventLoop(uvloop.Loop):
    """uvloop's, which takes all wake-ups of gRPC at once.

    A thread of gRPC sends the loop a byte for each event. The loop handles all events each time it is woken, but reads
    one byte: of a few hundred events at once each would wake it again. Worse, the buffer of these bytes is then full,
    the thread waits for room in it, and from then on an iteration of the loop gets one event.
    """

    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:  # type: ignore[override]
        handler = getattr(callback, "func", None)
        if isinstance(getattr(handler, "__self__", None), cygrpc.PollerCompletionQueue):
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
