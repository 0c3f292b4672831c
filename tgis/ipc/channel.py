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

from tgis.ipc.messages import Fatal, FrameReader, encode_frame

log = logging.getLogger(__name__)

_RECV_BYTES = 1 << 18


class Channel:
    """A thread reads the socket, so that its end of file is noticed during a long step."""

    def __init__(self, sock: socket.socket, message_type: Any) -> None:
        """The parent sends members of `union`."""
        self._socket = sock
        self._message_type = message_type
        self._send_lock = threading.Lock()
        self._received: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._handlers: dict[type, Callable[[Any], None]] = {}
        threading.Thread(target=self._read, daemon=True, name="link").start()

    def receive(self, *, wait: bool) -> list[Any]:
        """The messages that have arrived; with `wait`, at least one."""
        messages = [self._received.get()] if wait else []
        while not self._received.empty():
            messages.append(self._received.get())
        return messages

    def handle_inline(self, message_type: type, handler: Callable[[Any], None]) -> None:
        """Let messages of a type that nobody sends yet go there at once, in the thread that reads."""
        self._handlers[message_type] = handler

    def send(self, message: msgspec.Struct) -> None:
        """Send one message; the parent always reads."""
        with self._send_lock:
            self._socket.sendall(encode_frame(message))

    def abort(self, reason: str) -> NoReturn:
        """Say why, and leave at once, from any thread: others may be stuck where nothing wakes them."""
        try:
            self.send(Fatal(reason))
        finally:
            os._exit(1)

    def _read(self) -> None:
        reader = FrameReader(self._message_type)
        try:
            while data := self._socket.recv(_RECV_BYTES):
                for message in reader.feed(data):
                    self._handlers.get(type(message), self._received.put)(message)
        except OSError:
            log.debug("the link broke", exc_info=True)
        os._exit(0)  # the parent is gone: nobody is left to serve or to tell
