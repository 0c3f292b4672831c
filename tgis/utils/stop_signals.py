"""SIGTERM, SIGINT and SIGHUP of a server, from its first line on.

By default they end a process without cleaning up, or do nothing at all where it is PID 1 of a container.
"""

import os
import signal
import sys
from collections.abc import Callable


def handle(handler: Callable[[signal.Signals], object]) -> None:
    """Call `handler` in the main thread, between any two of its instructions; SIGHUP stays ignored under nohup."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, _frame: handler(signal.Signals(number)))


def ignore() -> None:
    """Ignore further ones, also while the interpreter ends."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def handle_by_exit() -> None:
    """Exit with code 0 on the first one, cleaning up on the way."""
    sys.unraisablehook = _exit_if_swallowed
    handle(_exit)


def _exit(_number: signal.Signals) -> None:
    ignore()
    raise SystemExit(0)


def _exit_if_swallowed(unraisable: "sys.UnraisableHookArgs") -> None:
    """The signal may have come in a callback, which cannot raise: importing modules runs many."""
    if isinstance(unraisable.exc_value, SystemExit):
        os._exit(0)
    sys.__unraisablehook__(unraisable)
