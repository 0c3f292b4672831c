"""The socket between two processes: its frames, and a child's end of it.

A frame is four bytes of length (little endian), then one msgpack message. The child is the engine process of the front
end, or another rank of the engine process. End of file means that the parent died, and ends the child at once.
"""

import logging
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NoReturn

import msgspec

from tgis.ipc.messages import Fatal, Heartbeat

log = logging.getLogger(__name__)

_LENGTH = struct.Struct("<I")
_RECV_BYTES = 1 << 18
_MAX_FRAME_BYTES = 1 << 30
_HEARTBEAT_SECONDS = 1.0

_encoder = msgspec.msgpack.Encoder()


def encode_frame(message: msgspec.Struct) -> bytes:
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Splits a byte stream into frames and decodes each as one member of the union `message_type`."""

    def __init__(self, message_type: Any, max_frame_bytes: int = _MAX_FRAME_BYTES) -> None:
        self._max_frame_bytes = max_frame_bytes
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(message_type)
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> list[Any]:
        """Return the messages that `data` completes, in order."""
        self._buffer += data
        messages, start = [], 0
        while len(self._buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            if length > self._max_frame_bytes:
                raise ConnectionError(f"a frame of {length} bytes, at most {self._max_frame_bytes} are allowed")
            end = start + _LENGTH.size + length
            if end > len(self._buffer):
                break
            messages.append(self._decoder.decode(memoryview(self._buffer)[start + _LENGTH.size : end]))
            start = end
        if start:
            del self._buffer[:start]
        return messages


def receive_messages(sock: socket.socket, message_type: Any, max_frame_bytes: int = _MAX_FRAME_BYTES) -> Iterator[Any]:
    """The messages of a blocking socket as they arrive, until end-of-file; OSError if it breaks.

    All reads share a buffer: separate buffers, with parts of messages kept between them, would fragment the heap.
    """
    reader, buffer = FrameReader(message_type, max_frame_bytes), memoryview(bytearray(_RECV_BYTES))
    while count := sock.recv_into(buffer):
        yield from reader.feed(buffer[:count])


def _exit(_reason: str) -> NoReturn:
    os._exit(0)  # nobody is left to serve or to tell


class Channel:
    """Reads the socket in a separate thread, so that end-of-file is noticed during a long step."""

    def __init__(self, sock: socket.socket, message_type: Any, on_end: Callable[[str], object] = _exit) -> None:
        """`message_type` is the union of what the parent sends. `on_end` is called with the reason, from any thread,
        when the parent is gone; by default that ends the process.
        """
        self.on_end = on_end
        self._socket = sock
        self._message_type = message_type
        self._send_lock = threading.Lock()
        self._received: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._handlers: dict[type, Callable[[Any], None]] = {}
        self.resident_cache_bytes: Callable[[], int] = lambda: 0  # memory of the engine's caches, once it is loaded
        threading.Thread(target=self._read, daemon=True, name="channel").start()

    def receive(self, *, timeout: float | None = None) -> list[Any]:
        """Return the messages that have arrived, or wait for one until the timeout, None for ever."""
        messages = []
        with suppress(queue.Empty):
            messages.append(self._received.get(timeout=timeout))
        while not self._received.empty():
            messages.append(self._received.get())
        return messages

    def handle_inline(self, message_type: type, handler: Callable[[Any], None]) -> None:
        """Run `handler` in the reader thread for this type instead of queueing it; call before the parent sends any."""
        self._handlers[message_type] = handler

    def send(self, message: msgspec.Struct) -> None:
        """Send one message from any thread; the parent always reads."""
        with self._send_lock:
            try:
                self._socket.sendall(encode_frame(message))
            except OSError as error:
                self.on_end(error.strerror or str(error))  # the reader thread has yet to notice

    def start_heartbeat(self, make_heartbeat: Callable[[], Heartbeat]) -> None:
        """Send heartbeats from a separate thread, since the others may be busy for long."""
        threading.Thread(target=self._beat, args=(make_heartbeat,), daemon=True, name="heartbeat").start()

    def abort(self, reason: str) -> NoReturn:
        """Send the reason and exit at once, from any thread: others may hang where nothing can wake them."""
        try:
            self.send(Fatal(reason))
            logging.shutdown()  # writes what waits, for a second at most
        finally:
            os._exit(1)

    def _beat(self, make_heartbeat: Callable[[], Heartbeat]) -> NoReturn:
        while True:
            self.send(make_heartbeat())
            time.sleep(_HEARTBEAT_SECONDS)

    def _read(self) -> None:
        reason = "its connection was closed"
        try:
            for message in receive_messages(self._socket, self._message_type):
                self._handlers.get(type(message), self._received.put)(message)
        except OSError as error:
            reason = error.strerror or str(error)
        except Exception as error:  # without this thread the process would hang
            log.exception("the channel cannot be read")
            self.abort(f"a message could not be handled: {error!r}")
        self.on_end(reason)
