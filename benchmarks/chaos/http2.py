"""HTTP/2 frames by hand, for clients that break the rules which a client library would enforce."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING = 0, 1, 3, 4, 6
ACK = END_STREAM = 1
END_HEADERS = 4
_INITIAL_WINDOW_SIZE = 4
MAX_WINDOW = (1 << 31) - 1
_CANCEL = 8


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def window_setting(size: int) -> bytes:
    """A settings entry: how many bytes the server may send on a stream before the client reads."""
    return _INITIAL_WINDOW_SIZE.to_bytes(2, "big") + size.to_bytes(4, "big")


def header_block(path: str, *more: tuple[str, str]) -> bytes:
    """The headers of a gRPC call, all encoded as literals."""
    fixed = ((":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "localhost"))
    grpc = (("content-type", "application/grpc"), ("te", "trailers"))
    return b"".join(b"\0" + _literal(name) + _literal(value) for name, value in (*fixed, *grpc, *more))


def _literal(text: str) -> bytes:
    """An HPACK string without Huffman coding."""
    length, prefix = len(text), b""
    if length >= 127:
        prefix, length = b"\x7f", length - 127
        while length >= 128:
            prefix, length = prefix + bytes((length % 128 + 128,)), length // 128
    return prefix + bytes((length,)) + text.encode()


def grpc_message(body: bytes) -> bytes:
    return b"\0" + len(body).to_bytes(4, "big") + body


@dataclass(slots=True)
class Connection:
    """One connection to a gRPC port; raises OSError or EOFError once the server has closed it."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    metadata: tuple[tuple[str, str], ...] = ()
    open_streams: set[int] = field(default_factory=set)
    on_frame: Callable[[], None] = lambda: None
    _streams: Iterator[int] = field(default_factory=lambda: itertools.count(1, 2))

    async def send(self, *frames: bytes) -> None:
        self.writer.write(b"".join(frames))
        await self.writer.drain()

    async def open_call(self, path: str, data: bytes = b"", *, end: bool = True) -> int:
        """Start a call and return its stream; `data` must fit into the server's window."""
        stream = next(self._streams)
        self.open_streams.add(stream)
        frames = [frame(HEADERS, END_HEADERS, stream, header_block(path, *self.metadata))]
        frames += [frame(DATA, 0, stream, data[at : at + 16384]) for at in range(0, len(data), 16384)]
        await self.send(*frames, *[frame(DATA, END_STREAM, stream)] * end)
        return stream

    async def reset(self, *streams: int) -> None:
        self.open_streams.difference_update(streams)
        await self.send(*(frame(RST_STREAM, 0, stream, _CANCEL.to_bytes(4, "big")) for stream in streams))

    async def wait_ended(self) -> None:
        """Wait until the server has ended all calls."""
        while self.open_streams:
            await asyncio.sleep(0.02)

    async def serve(self) -> None:
        """Answer pings and settings and discard the rest, until the server closes the connection."""
        while True:
            head = await self.reader.readexactly(9)
            payload = await self.reader.readexactly(int.from_bytes(head[:3], "big"))
            kind, flags, stream = head[3], head[4], int.from_bytes(head[5:], "big")
            self.on_frame()
            if kind == RST_STREAM or (kind in (DATA, HEADERS) and flags & END_STREAM):
                self.open_streams.discard(stream)
            if kind in (SETTINGS, PING) and not flags & ACK:
                await self.send(frame(kind, ACK, 0, payload if kind == PING else b""))


@contextlib.asynccontextmanager
async def connect(
    port: int, token: str = "", window: int = MAX_WINDOW, on_frame: Callable[[], None] = lambda: None
) -> AsyncIterator[Connection]:
    """A connection with a window of `window` bytes per stream; cancels the block when the server closes it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    connection = Connection(reader, writer, metadata, on_frame=on_frame)
    try:
        await connection.send(PREFACE, frame(SETTINGS, 0, 0, window_setting(window)))
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(connection.serve())
            yield connection
            serving.cancel()
    finally:
        writer.transport.abort()
