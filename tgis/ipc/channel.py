"""A child process's end of the socket to its parent: the engine's to the front end, another rank's to the engine.

The parent's death is end of file, and ends this process at once, whatever it is doing.
"""

import logging
import os
import queue
import socket
import threading
from collections.abc import Callable
from typing import Any, NoReturn

import msgspec

from tgis.ipc.messages import Fatal, FrameReader, pack

log = logging.getLogger(__name__)

_CHUNK = 1 << 18


class Link:
    """A thread reads the socket, so that its end of file is noticed during a long step."""

    def __init__(self, sock: socket.socket, union: Any) -> None:
        """The parent sends members of `union`."""
        self._socket = sock
        self._union = union
        self._sending = threading.Lock()
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._diverted: dict[type, Callable[[Any], None]] = {}
        threading.Thread(target=self._read, daemon=True, name="link").start()

    def receive(self, *, wait: bool) -> list[Any]:
        """The messages that have arrived; with `wait`, at least one."""
        messages = [self._inbox.get()] if wait else []
        while not self._inbox.empty():
            messages.append(self._inbox.get())
        return messages

    def divert(self, kind: type, to: Callable[[Any], None]) -> None:
        """Let messages of a type that nobody sends yet go there at once, in the thread that reads."""
        self._diverted[kind] = to

    def send(self, message: msgspec.Struct) -> None:
        """Send one message; the parent always reads."""
        with self._sending:
            self._socket.sendall(pack(message))

    def end(self, reason: str) -> NoReturn:
        """Say why, and leave at once, from any thread: others may be stuck where nothing wakes them."""
        try:
            self.send(Fatal(reason))
        finally:
            os._exit(1)

    def _read(self) -> None:
        reader = FrameReader(self._union)
        try:
            while data := self._socket.recv(_CHUNK):
                for message in reader.feed(data):
                    self._diverted.get(type(message), self._inbox.put)(message)
        except OSError:
            log.debug("the link broke", exc_info=True)
        os._exit(0)  # the parent is gone: nobody is left to serve or to tell
