"""A client that speaks HTTP/2 by hand, for what no library client would do."""

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY = 0, 1, 3, 4, 6, 7
END_STREAM, END_HEADERS = 1, 4
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


HELLO = PREFACE + frame(SETTINGS, 0, 0)
HELLO_WITHOUT_WINDOW = PREFACE + frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 0))  # the server may not send any data


def call_headers(path: bytes, stream: int = 1, flags: int = END_HEADERS) -> bytes:
    """The start of a call."""
    pseudo = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", path), (b":authority", b"t")]
    fields = [*pseudo, (b"te", b"trailers"), (b"content-type", b"application/grpc")]
    block = b"".join(b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value for name, value in fields)
    return frame(HEADERS, flags, stream, block)


def message_frames(message: bytes, stream: int = 1) -> bytes:
    """A whole message, and the end of the client's messages."""
    data = b"\0" + struct.pack(">I", len(message)) + message
    return frame(DATA, END_STREAM, stream, data)


def half_a_message(stream: int = 1, size: int = 1000) -> bytes:
    """The first half of a message of that size."""
    return frame(DATA, 0, stream, b"\0" + struct.pack(">I", size) + bytes(size // 2))


def call_frames(path: bytes, message: bytes = b"", stream: int = 1) -> bytes:
    """A call with one message."""
    return call_headers(path, stream) + message_frames(message, stream)


Raw = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def raw_client(port: int, *sent: bytes) -> AsyncIterator[Raw]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.writelines(sent)
    try:
        yield reader, writer
    finally:
        writer.close()


async def next_frame(reader: asyncio.StreamReader) -> tuple[int, int, bytes]:
    """Kind, flags and payload."""
    head = await reader.readexactly(9)
    return head[3], head[4], await reader.readexactly(int.from_bytes(head[:3], "big"))


async def next_frame_of(reader: asyncio.StreamReader, *kinds: int) -> tuple[int, bytes]:
    """Kind and payload of the next frame of one of these kinds."""
    while True:
        kind, _flags, payload = await next_frame(reader)
        if kind in kinds:
            return kind, payload
