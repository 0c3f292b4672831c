"""SIGTERM, SIGINT and SIGHUP of a server, from its first line on.

By default they end a process without cleaning up, or do nothing at all where it is PID 1 of a container.
"""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

_NUMBERS = signal.SIGTERM, signal.SIGINT, signal.SIGHUP


def handle(handler: Callable[[int, FrameType | None], object]) -> None:
    """Call `handler` in the main thread, between any two of its instructions; SIGHUP stays ignored under nohup."""
    for number in _NUMBERS:
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def futures() -> "tuple[asyncio.Future[None], asyncio.Future[None]]":
    """One done on the first SIGTERM, SIGINT or SIGHUP, and one on a SIGINT after that."""
    import asyncio  # noqa: PLC0415 - a server handles signals before it imports much

    loop = asyncio.get_running_loop()
    stop: asyncio.Future[None] = loop.create_future()
    second_signal: asyncio.Future[None] = loop.create_future()
    handle(lambda number, _frame: loop.call_soon_threadsafe(_signalled, number, stop, second_signal))
    return stop, second_signal


def _signalled(number: int, stop: "asyncio.Future[None]", second_signal: "asyncio.Future[None]") -> None:
    if not stop.done():
        stop.set_result(None)
    elif number == signal.SIGINT and not second_signal.done():
        second_signal.set_result(None)


def ignore() -> None:
    """Ignore further ones, also while the interpreter ends."""
    for number in _NUMBERS:
        signal.signal(number, signal.SIG_IGN)


def handle_by_exit() -> None:
    """Exit with code 0 on the first one, at once: a server that starts has nothing to undo, but in `undoing`.

    An exception would hit C code that calls Python, such as that of a module's import: some of it goes on as if
    nothing had happened, some crashes.
    """
    handle(_exit)


@contextlib.contextmanager
def undoing() -> Iterator[None]:
    """A block in which the first one raises SystemExit instead, so that those outside undo what they have begun."""
    if signal.getsignal(signal.SIGTERM) is not _exit:  # no server, or one that serves
        yield
        return
    handle(_raise)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is _raise:
            handle(_exit)


def _exit(_number: int, _frame: FrameType | None) -> None:
    os._exit(0)


def _raise(_number: int, _frame: FrameType | None) -> None:
    ignore()
    raise SystemExit(0)
