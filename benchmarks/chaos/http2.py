"""HTTP/2 by hand: attackers can break the rules that a client library would enforce.

Frames are written as the caller asks. What the server sends is discarded, except that pings and settings are answered.
"""

import asyncio
import contextlib
import itertools
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY = 0, 1, 3, 4, 6, 7
ACK = END_STREAM = 1
END_HEADERS = 4
_INITIAL_WINDOW_SIZE = 4
MAX_WINDOW = (1 << 31) - 1
_CANCEL = 8

attack: ContextVar[str] = ContextVar("attack", default="")  # of this task
reached: Counter[str] = Counter()  # attack -> its calls, or connections without any, that have reached the server


def count_reached(calls: int = 1) -> None:
    reached[attack.get()] += calls


@dataclass(frozen=True, slots=True)
class Target:
    """The ports of a server, and a client's credentials for it."""

    grpc_port: int
    http_port: int
    ca: Path | None = None  # with TLS
    token: str = ""
    host: str = "127.0.0.1"
    api_port: int = 0  # of the HTTP APIs, with the TLS of gRPC; 0: they are on http_port

    @property
    def address(self) -> str:
        """Host and port of gRPC."""
        return f"{self.host}:{self.grpc_port}"

    def tls(self, protocol: str = "h2") -> ssl.SSLContext | None:
        """The TLS context for the ports of gRPC and of the HTTP APIs; None without TLS."""
        if self.ca is None:
            return None
        context = ssl.create_default_context(cafile=str(self.ca))
        context.set_alpn_protocols([protocol])
        return context


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


def grpc_message(body: bytes, *, compressed: bool = False) -> bytes:
    return bytes((compressed,)) + len(body).to_bytes(4, "big") + body


@dataclass(slots=True)
class Connection:
    """One connection to the gRPC port; raises OSError or EOFError once the server has closed it."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    metadata: tuple[tuple[str, str], ...] = ()
    heard: bool = False  # from the server
    unheard: int = 0  # calls before that
    _streams: Iterator[int] = field(default_factory=lambda: itertools.count(1, 2))

    async def send(self, *frames: bytes) -> None:
        self.writer.write(b"".join(frames))
        await self.writer.drain()

    async def open_call(self, path: str, data: bytes = b"", *, end: bool = True) -> int:
        """Start a call and return its stream; `data` is sent as it is, and must fit into the server's window."""
        stream = next(self._streams)
        frames = [frame(HEADERS, END_HEADERS, stream, header_block(path, *self.metadata))]
        if data or end:
            frames += [frame(DATA, 0, stream, data[at : at + 16384]) for at in range(0, len(data), 16384)]
            frames += [frame(DATA, END_STREAM, stream)] * end
        await self.send(*frames)
        self.unheard += not self.heard
        count_reached(self.heard)
        return stream

    async def reset(self, *streams: int) -> None:
        await self.send(*(frame(RST_STREAM, 0, stream, _CANCEL.to_bytes(4, "big")) for stream in streams))

    async def serve(self) -> None:
        """Answer pings and settings until the server closes the connection."""
        while True:
            head = await self.reader.readexactly(9)
            payload = await self.reader.readexactly(int.from_bytes(head[:3], "big"))
            kind, flags = head[3], head[4]
            count_reached(self.unheard + (kind == PING and flags & ACK))
            self.heard, self.unheard = True, 0
            if kind == GOAWAY:
                raise EOFError
            if kind in (SETTINGS, PING) and not flags & ACK:
                await self.send(frame(kind, ACK, 0, payload if kind == PING else b""))


@contextlib.asynccontextmanager
async def connect(target: Target, window: int = MAX_WINDOW) -> AsyncIterator[Connection]:
    """A connection with a window of `window` bytes per stream; cancels the block when the server closes it."""
    tls = target.tls()
    name = "localhost" if tls else None
    reader, writer = await asyncio.open_connection(target.host, target.grpc_port, ssl=tls, server_hostname=name)
    metadata = (("authorization", f"Bearer {target.token}"),) if target.token else ()
    connection = Connection(reader, writer, metadata)
    try:
        await connection.send(PREFACE, frame(SETTINGS, 0, 0, window_setting(window)))
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(connection.serve())
            yield connection
            serving.cancel()
    finally:
        writer.transport.abort()
