"""Frames on the socket between two processes: four bytes of length (little endian), then one msgpack message."""

import socket
import struct
from collections.abc import Iterator
from typing import Any

import msgspec

MAX_FRAME_BYTES = 1 << 30  # far above any real message: a corrupt length must not allocate all memory
_LENGTH = struct.Struct("<I")
_RECV_BYTES = 1 << 18

_encoder = msgspec.msgpack.Encoder()


def encode_frame(message: msgspec.Struct) -> bytes:
    body = _encoder.encode(message)
    assert len(body) <= MAX_FRAME_BYTES
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Splits a byte stream into frames and decodes each as one member of the union `message_type`."""

    def __init__(self, message_type: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(message_type)
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> list[Any]:
        """Return the messages that `data` completes, in order."""
        self._buffer += data
        messages, start = [], 0
        while len(self._buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            assert length <= MAX_FRAME_BYTES
            end = start + _LENGTH.size + length
            if end > len(self._buffer):
                break
            messages.append(self._decoder.decode(memoryview(self._buffer)[start + _LENGTH.size : end]))
            start = end
        if start:
            del self._buffer[:start]
        return messages


def receive_messages(sock: socket.socket, message_type: Any) -> Iterator[Any]:
    """The messages from a blocking socket as they arrive, until end-of-file; OSError if it breaks.

    All reads share a buffer: what is kept of a message would break the heap up between buffers of their own.
    """
    reader, buffer = FrameReader(message_type), memoryview(bytearray(_RECV_BYTES))
    while count := sock.recv_into(buffer):
        yield from reader.feed(buffer[:count])
