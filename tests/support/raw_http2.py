"""A client that speaks HTTP/2 by hand, for what no library client would do."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from benchmarks.chaos.http2 import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PREFACE,
    SETTINGS,
    frame,
    grpc_message,
    header_block,
    window_setting,
)

HELLO = PREFACE + frame(SETTINGS, 0, 0)
HELLO_WITHOUT_WINDOW = PREFACE + frame(SETTINGS, 0, 0, window_setting(0))  # the server may not send any data


def call_headers(path: str, stream: int = 1) -> bytes:
    """The start of a call."""
    return frame(HEADERS, END_HEADERS, stream, header_block(path))


def message_frames(message: bytes, stream: int = 1) -> bytes:
    """A whole message, and the end of the client's messages."""
    return frame(DATA, END_STREAM, stream, grpc_message(message))


def half_a_message() -> bytes:
    """The first half of a message of a first call."""
    return frame(DATA, 0, 1, grpc_message(bytes(1000))[:505])


def call_frames(path: str, message: bytes = b"", stream: int = 1) -> bytes:
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
