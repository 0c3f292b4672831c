"""What hostile clients do. Each attack goes on until it is cancelled; none expects an answer."""

import asyncio
import contextlib
import gzip
import random
from collections.abc import Awaitable, Callable
from typing import Any

import grpc.aio

from benchmarks.chaos.http2 import PING, PREFACE, Target, attack, connect, count_reached, frame, grpc_message
from benchmarks.chaos.http_attacks import HTTP_ATTACKS, answer, open_http
from benchmarks.soak.requests import batch_request, stream_request
from tgis.pb import generation_pb2 as pb

_SERVICE = "/fmaas.GenerationService/"
_GENERATE, _STREAM, _TOKENIZE = (_SERVICE + name for name in ("Generate", "GenerateStream", "Tokenize"))
_WATCH = "/grpc.health.v1.Health/Watch"
_REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
_MAX_MESSAGE = (4 << 20) - 64
_CALLS = 100  # per connection; servers usually allow as many
_CONNECTIONS = 50

Attack = Callable[[Target, random.Random], Awaitable[None]]


def _stream_message(tokens: int) -> bytes:
    params = pb.Parameters(stopping=pb.StoppingCriteria(max_new_tokens=tokens, min_new_tokens=tokens))
    return grpc_message(stream_request("Once upon a time", params).SerializeToString())


def _text_field(number: int, size: int) -> bytes:
    """Encode a string field of protobuf."""
    length = bytes(((size >> shift) & 127) | 128 * (shift < 21) for shift in (0, 7, 14, 21))
    return bytes((number << 3 | 2,)) + length + b"a" * size


async def zero_window(target: Target, draw: random.Random) -> None:
    """Streams that are never read."""
    async with connect(target, window=0) as connection:
        for _ in range(_CALLS):
            await connection.open_call(_STREAM, _stream_message(200))
        await _hold(draw)


async def half_messages(target: Target, draw: random.Random) -> None:
    """Messages announced as 4 MiB, of which only a kilobyte is sent."""
    async with connect(target) as connection:
        for _ in range(_CALLS):
            await connection.open_call(_GENERATE, grpc_message(bytes(_MAX_MESSAGE))[:1024], end=False)
            await asyncio.sleep(0)
        await _hold(draw)


async def headers_only(target: Target, draw: random.Random) -> None:
    async with connect(target) as connection:
        for _ in range(_CALLS):
            await connection.open_call(draw.choice((_GENERATE, _STREAM, _TOKENIZE)), end=False)
        await _hold(draw)


async def rapid_reset(target: Target, _draw: random.Random) -> None:
    """Calls that are reset right after they start."""
    message = _stream_message(20)
    async with connect(target) as connection:
        while True:
            await connection.reset(await connection.open_call(_STREAM, message))
            await asyncio.sleep(0)


async def cancelled_calls(target: Target, draw: random.Random) -> None:
    """Calls that are cancelled soon after they start."""
    message = _stream_message(100)
    async with connect(target) as connection:
        while True:
            streams = [await connection.open_call(_STREAM, message) for _ in range(10)]
            await asyncio.sleep(0.3 * draw.random())
            await connection.reset(*streams)


async def pings(target: Target, _draw: random.Random) -> None:
    async with connect(target) as connection:
        while True:
            await connection.send(*[frame(PING, 0, 0, bytes(8))] * 100)
            await asyncio.sleep(0)


async def reflection(target: Target, draw: random.Random) -> None:
    """Reflection streams that send some requests and then stay open."""
    async with connect(target, window=0) as connection:
        for _ in range(_CALLS):
            await connection.open_call(_REFLECTION, grpc_message(b"\x3a\x00") * 50, end=False)
        await _hold(draw)


async def gzip_bomb(target: Target, _draw: random.Random) -> None:
    bomb = grpc_message(gzip.compress(bytes(40 << 20)), compressed=True)
    async with connect(target) as connection:
        connection.metadata += (("grpc-encoding", "gzip"),)
        while True:
            await connection.open_call(_GENERATE, bomb)
            await asyncio.sleep(0.05)


async def churn(target: Target, _draw: random.Random) -> None:
    """Connections that are opened and closed at once."""
    while True:
        async with connect(target):
            count_reached()


async def garbage(target: Target, draw: random.Random) -> None:
    """Garbage to all ports: HTTP/1.1 without a host, random bytes, half a TLS handshake."""
    for port in (target.grpc_port, target.http_port, target.api_port or target.http_port) * 20:
        _, writer = await asyncio.open_connection(target.host, port)
        large = PREFACE * draw.randint(0, 1) + draw.randbytes(256 << 10)
        parts = b"GET / HTTP/1.1\r\n\r\n", draw.randbytes(2000), b"\x16\x03\x01\x02\x00" * 100, large
        writer.write(draw.choice(parts))
        await writer.drain()
        count_reached()
        writer.transport.abort()


async def silence(target: Target, draw: random.Random) -> None:
    """Connections to all ports that send nothing."""
    await _open_sockets(target, draw, (target.grpc_port, target.http_port, target.api_port or target.http_port), b"")


async def slow_loris(target: Target, draw: random.Random) -> None:
    """HTTP requests whose headers arrive one byte at a time."""
    await _open_sockets(target, draw, (target.http_port,), b"GET /health HTTP/1.1\r\nX-a: a")


async def _open_sockets(target: Target, draw: random.Random, ports: tuple[int, ...], head: bytes) -> None:
    writers = []
    try:
        for number in range(_CONNECTIONS):
            writers.append((await asyncio.open_connection(target.host, ports[number % len(ports)]))[1])
            writers[-1].write(head)
            count_reached()
        for _ in range(draw.randint(10, 50)):
            await asyncio.sleep(0.1)
            for writer in writers if head else ():
                writer.write(b"a")
    finally:
        for writer in writers:
            writer.transport.abort()


async def scrapes(target: Target, _draw: random.Random) -> None:
    """Requests for /metrics, one after the other."""
    async with open_http(target, api=False) as (reader, writer):
        while True:
            writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await answer(reader)


async def _hold(draw: random.Random) -> None:
    await asyncio.sleep(draw.uniform(1, 5))


def _flood(path: str, make_message: Callable[[], bytes], *, in_flight: int = 4) -> Attack:
    """An attack by well-formed calls of a client library."""

    async def flood(target: Target, _draw: random.Random) -> None:
        message = make_message()
        metadata = (("authorization", f"Bearer {target.token}"),) if target.token else ()
        async with channel(target) as made, asyncio.TaskGroup() as group:
            for _ in range(in_flight):
                group.create_task(_call_for_ever(made, path, message, metadata))

    return flood


async def _call_for_ever(made: grpc.aio.Channel, path: str, message: bytes, metadata: Any) -> None:
    """Call a method again and again; unary methods are called as streaming ones, which works the same."""
    while True:
        call = made.unary_stream(path, bytes, bytes)(message, metadata=metadata, timeout=30)
        try:
            async for _ in call:
                pass
            count_reached()
        except grpc.aio.AioRpcError as error:
            if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAUTHENTICATED):
                count_reached()
            await asyncio.sleep(0.01)


def channel(target: Target, credentials: grpc.ChannelCredentials | None = None) -> grpc.aio.Channel:
    """A new connection to the server."""
    options: list[tuple[str, Any]] = [
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.max_receive_message_length", -1),
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 500),
    ]
    if target.ca is None:
        return grpc.aio.insecure_channel(target.address, options)
    credentials = credentials or grpc.ssl_channel_credentials(target.ca.read_bytes())
    return grpc.aio.secure_channel(
        target.address, credentials, [*options, ("grpc.ssl_target_name_override", "localhost")]
    )


def _details() -> bytes:
    """A call that asks for all details of all tokens of 32 long inputs."""
    options = pb.ResponseOptions(
        input_tokens=True, generated_tokens=True, token_logprobs=True, token_ranks=True, top_n_tokens=10
    )
    params = pb.Parameters(stopping=pb.StoppingCriteria(max_new_tokens=2), response=options, truncate_input_tokens=120)
    return batch_request(["word " * 400] * 32, params).SerializeToString()


def _tokenize(size: int) -> bytes:
    """A call to Tokenize that asks for everything about a text of `size` bytes."""
    request = pb.TokenizeRequest(text="lorem ipsum " * (size // 12))
    batch = pb.BatchedTokenizeRequest(requests=[request], return_tokens=True, return_offsets=True)
    return batch.SerializeToString()


def _long_texts(truncate: int) -> bytes:
    few = pb.Parameters(stopping=pb.StoppingCriteria(max_new_tokens=2), truncate_input_tokens=truncate)
    return batch_request(["lorem ipsum " * (_MAX_MESSAGE // 24)] * 2, few).SerializeToString()


def _repeated(batch: Any) -> bytes:
    """A message of 4 MiB that repeats the few bytes of `batch`."""
    one: bytes = batch.SerializeToString()
    return one * (_MAX_MESSAGE // len(one))


_NO_TEXTS = pb.BatchedTokenizeRequest(requests=[pb.TokenizeRequest()])
_NO_INPUTS = pb.BatchedGenerationRequest(requests=[pb.GenerationRequest()])

ATTACKS: dict[str, Attack] = {
    "zero_window": zero_window,
    "half_messages": half_messages,
    "headers_only": headers_only,
    "rapid_reset": rapid_reset,
    "cancelled_calls": cancelled_calls,
    "pings": pings,
    "reflection": reflection,
    "gzip_bomb": gzip_bomb,
    "churn": churn,
    "garbage": garbage,
    "silence": silence,
    "slow_loris": slow_loris,
    "scrapes": scrapes,
    "watch_names": _flood(_WATCH, lambda: _text_field(1, _MAX_MESSAGE), in_flight=16),
    "tokenize_empty": _flood(_TOKENIZE, lambda: _repeated(_NO_TEXTS)),
    "tokenize_long": _flood(_TOKENIZE, lambda: _tokenize(_MAX_MESSAGE)),
    "tokenize_fitting": _flood(_TOKENIZE, lambda: _tokenize(_MAX_MESSAGE // 32)),  # the reply can be sent
    "generate_empty": _flood(_GENERATE, lambda: _repeated(_NO_INPUTS)),
    "long_texts": _flood(_GENERATE, lambda: _long_texts(0)),
    "truncated_texts": _flood(_GENERATE, lambda: _long_texts(10)),
    "details": _flood(_GENERATE, _details, in_flight=2),
    "oversized": _flood(_GENERATE, lambda: bytes(5 << 20)),
    **HTTP_ATTACKS,
}


async def attack_until(name: str, target: Target, seconds: float, draw: random.Random) -> None:
    """Run an attack until the deadline; restart it when the server drops its connections."""
    attack.set(name)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while True:
                try:
                    await ATTACKS[name](target, draw)
                except* (OSError, EOFError, grpc.aio.AioRpcError):
                    await asyncio.sleep(0.05)
