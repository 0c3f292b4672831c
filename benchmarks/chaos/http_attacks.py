"""What hostile clients do over HTTP: to the routes of TGI and OpenAI, to probes and pages."""

import asyncio
import json
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from benchmarks.chaos.http2 import Target, count_reached

_LARGE = 1_900_000  # bytes, just below the limit of a body
_PIECE = 256 << 10
_CONNECTIONS = 30
_PAGES = (
    "/ui",
    "/docs",
    "/openapi.json",
    "/info",
    "/v1/models",
    "/v1/models/x",
    "/health",
    "/ping",
    "/debug/batch",
    "/x",
)

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def open_http(target: Target, *, api: bool = True, receive_buffer: int | None = None) -> AsyncIterator[Stream]:
    """A connection to the port of the HTTP APIs, or to that of probes."""
    port = target.api_port if api and target.api_port else target.http_port
    tls = target.tls("http/1.1") if api and target.api_port else None
    connection = socket.socket()
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(connection, (target.host, port))
        name = "localhost" if tls else None
        reader, writer = await asyncio.open_connection(sock=connection, ssl=tls, server_hostname=name, limit=1 << 16)
    except BaseException:
        connection.close()
        raise
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


def _request(target: Target, path: str, body: bytes | None = None, length: int | None = None) -> bytes:
    """A request; of the body only a beginning if it has less than `length`."""
    token = f"Authorization: Bearer {target.token}\r\n" if target.token else ""
    if body is None:
        return f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{token}\r\n".encode()
    fields = f"Content-Type: application/json\r\nContent-Length: {length or len(body)}\r\n"
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{token}{fields}\r\n".encode() + body


async def answer(reader: asyncio.StreamReader) -> None:
    """Read an answer; one to a caller who is unknown does not count."""
    head = await reader.readuntil(b"\r\n\r\n")
    if head.split(maxsplit=2)[1] != b"401":
        count_reached()
    fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if line)
    if b"content-length" in fields:
        await reader.readexactly(int(fields[b"content-length"]))
    while b"chunked" in fields.get(b"transfer-encoding", b""):
        size = int(await reader.readuntil(b"\r\n"), 16)
        await reader.readexactly(size + 2)
        if not size:
            break


def _bodies(text: str, tokens: int, **more: Any) -> list[tuple[str, bytes]]:
    """A body for each route."""
    tgi = {"inputs": text, "parameters": {"max_new_tokens": tokens, "details": True, "top_n_tokens": 5}} | more
    messages = [{"role": "user", "content": text}]
    openai = {"max_tokens": tokens} | more
    bodies = {
        **dict.fromkeys(("/", "/generate", "/generate_stream", "/invocations"), tgi),
        **dict.fromkeys(("/tokenize", "/chat_tokenize"), tgi | {"messages": messages}),
        "/v1/completions": openai | {"prompt": text, "logprobs": 5},
        "/v1/chat/completions": openai | {"messages": messages, "logprobs": True, "top_logprobs": 5},
    }
    return [(path, json.dumps(body).encode()) for path, body in bodies.items()]


def _deep(levels: int) -> list[tuple[str, bytes]]:
    """Bodies, schemas and arguments that are nested."""
    nested = b'{"type":"object","properties":{"a":' * levels + b"{}" + b"}}" * levels
    tool = b'{"messages":[],"tools":[{"function":{"name":"x","parameters":%b}}],"tool_choice":"required"}' % nested
    form = b'{"prompt":"a","messages":[],"response_format":{"type":"json_object","schema":%b}}' % nested
    grammar = b'{"inputs":"a","parameters":{"grammar":{"type":"json","value":%b}}}' % nested
    completions = "/v1/completions", "/v1/chat/completions"
    bodies = [(path, body) for path in completions for body in (tool, form, b"[" * levels * 20)]
    return bodies + [(path, body) for path in ("/", "/generate") for body in (grammar, b'{"inputs":' * levels * 4)]


def _asking(make: Callable[[], list[tuple[str, bytes]]]) -> Callable[[Target, random.Random], Awaitable[None]]:
    """An attack that sends one body after the other, and reads the answers."""

    async def ask(target: Target, draw: random.Random) -> None:
        requests = make()
        async with open_http(target) as (reader, writer):
            while True:
                writer.write(_request(target, *draw.choice(requests)))
                await writer.drain()
                await answer(reader)

    return ask


def _small() -> list[tuple[str, bytes]]:
    odd = [(path, body) for path, _ in _bodies("", 1) for body in (b"", b"{}", b"[]", b"{", b'"', b"\xff", b"null")]
    return odd + _bodies("a", 1) * 3


async def http_pages(target: Target, draw: random.Random) -> None:
    """Pages, probes, lists of models."""
    async with open_http(target) as (reader, writer):
        while True:
            writer.write(_request(target, draw.choice(_PAGES)))
            await answer(reader)


async def http_slow_bodies(target: Target, draw: random.Random) -> None:
    """Bodies that arrive one byte at a time."""
    async with AsyncExitStack() as stack:
        writers = []
        for _ in range(_CONNECTIONS):
            _, writer = await stack.enter_async_context(open_http(target))
            path, body = draw.choice(_bodies("a", 1))
            writer.write(_request(target, path, body[:1], 100_000))
            count_reached()
            writers.append(writer)
        for _ in range(draw.randint(10, 50)):
            await asyncio.sleep(0.1)
            for writer in writers:
                writer.write(b" ")


async def http_unread(target: Target, draw: random.Random) -> None:
    """Streams that nobody reads."""
    async with AsyncExitStack() as stack:
        for _ in range(_CONNECTIONS):
            _, writer = await stack.enter_async_context(open_http(target, receive_buffer=1024))
            writer.transport.pause_reading()  # type: ignore[attr-defined]  # typeshed has a base class
            writer.write(_request(target, *draw.choice(_bodies("Once upon a time", 200, stream=True))))
            count_reached()
        await asyncio.sleep(draw.uniform(1, 5))


async def http_cancelled(target: Target, draw: random.Random) -> None:
    """Streams whose clients leave after a moment."""
    while True:
        async with open_http(target) as (reader, writer):
            writer.write(_request(target, *draw.choice(_bodies("Once upon a time", 100, stream=True))))
            await asyncio.sleep(0.1 * draw.random())
            await reader.read(1)
            count_reached()


async def http_pipelining(target: Target, draw: random.Random) -> None:
    """Hundreds of requests at once on a connection whose answers nobody reads."""
    requests = [(path, None) for path in _PAGES] + [*_bodies("a", 5)]
    async with open_http(target) as (_, writer):
        for _ in range(500):
            writer.write(_request(target, *draw.choice(requests)))
            count_reached()
        await writer.drain()
        await asyncio.sleep(draw.uniform(0, 2))


async def junk(target: Target, draw: random.Random) -> None:
    """Pieces of 256 KiB: random bytes, a header or a chunk without end."""
    beginnings = (
        b"",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: ",
        b"POST /generate HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nfffffff\r\n",
        _request(target, "/v1/completions", b"", 1 << 40),
    )
    async with open_http(target, api=draw.random() < 0.7) as (_, writer):
        writer.write(draw.choice(beginnings))
        piece = draw.choice(
            (draw.randbytes(_PIECE), b"a" * _PIECE, b"\r\n" * (_PIECE // 2), b"GET / HTTP/1.1\r\n\r\n" * 14000)
        )
        for _ in range(40):
            writer.write(piece)
            await writer.drain()
            count_reached()


HTTP_ATTACKS = {
    "http_large": _asking(lambda: _bodies("lorem ipsum " * (_LARGE // 12), 2)),
    "http_deep": _asking(lambda: _deep(100) + _deep(5000)),
    "http_small": _asking(_small),
    "http_pages": http_pages,
    "http_slow_bodies": http_slow_bodies,
    "http_unread": http_unread,
    "http_cancelled": http_cancelled,
    "http_pipelining": http_pipelining,
    "junk": junk,
}
