"""The attacks: hostile clients in a process of their own, which go on until it is terminated."""

import asyncio
import contextlib
import logging
import multiprocessing
import os
import resource
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import grpc.aio

from benchmarks.chaos.http2 import DATA, connect, frame, grpc_message
from benchmarks.soak.requests import batch_request, stream_request
from tgis.pb import generation_pb2 as pb

_SERVICE = "/fmaas.GenerationService/"
GENERATE, STREAM, TOKENIZE = (_SERVICE + name for name in ("Generate", "GenerateStream", "Tokenize"))
_MESSAGE_LIMIT = (4 << 20) - 64
_SPAWN = multiprocessing.get_context("spawn")
# Errors of a server that refuses, resets or closes.
_ERRORS = (OSError, EOFError, aiohttp.ClientError, TimeoutError)


@dataclass(frozen=True, slots=True)
class Target:
    """The ports of a server; `answers` counts what attackers have received from it."""

    grpc_port: int
    http_port: int
    token: str = ""
    answers: Any = field(default_factory=partial(_SPAWN.Value, "q"))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    def count_answer(self, count: int = 1) -> None:
        self.answers.value += count

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()


Attack = Callable[[Target], Awaitable[None]]


async def _together(count: int, attack: Attack, target: Target) -> None:
    """Run an attack several times at once; restart one whose connection the server closes."""

    async def for_ever() -> None:
        while True:
            try:
                await attack(target)
            except* _ERRORS:
                await asyncio.sleep(0.05)

    await asyncio.gather(*(for_ever() for _ in range(count)))


def open_channel(port: int) -> grpc.aio.Channel:
    """A channel that shares its connection with no other."""
    options = [
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.max_receive_message_length", -1),
        ("grpc.max_reconnect_backoff_ms", 500),
    ]
    return grpc.aio.insecure_channel(f"127.0.0.1:{port}", options)


def _calls(path: str, message: bytes, *, channels: int, in_flight: int) -> Attack:
    """Calls of one method, a number of them in flight on each of several connections."""

    async def call(channel: grpc.aio.Channel, target: Target) -> None:
        method = channel.unary_unary(path, lambda data: data, lambda data: data)
        while True:
            try:
                await method(message, metadata=target.metadata, timeout=60)
                target.count_answer()
            except grpc.aio.AioRpcError as error:
                target.count_answer(error.code() != grpc.StatusCode.UNAVAILABLE)
                await asyncio.sleep(0.01)

    async def attack(target: Target) -> None:
        opened = [open_channel(target.grpc_port) for _ in range(channels)]
        await asyncio.gather(*(call(channel, target) for channel in opened for _ in range(in_flight)))

    return attack


def _requests(method: str, path: str, *addresses: str, **arguments: Any) -> Attack:
    """40 HTTP clients, with connections from each of these local addresses."""

    async def request(session: aiohttp.ClientSession, target: Target) -> None:
        async with session.request(method, target.url + path, **arguments) as answer:
            await answer.read()
            target.count_answer()

    async def attack(target: Target) -> None:
        async with contextlib.AsyncExitStack() as stack:
            connectors = [aiohttp.TCPConnector(limit=0, local_addr=(address, 0)) for address in addresses]
            sessions = [await stack.enter_async_context(aiohttp.ClientSession(connector=made)) for made in connectors]
            count = 40 // len(sessions)
            await asyncio.gather(*(_together(count, partial(request, session), target) for session in sessions))

    return attack


async def _rapid_reset(target: Target) -> None:
    message = _stream_message(20)
    async with connect(target.grpc_port, target.token, on_frame=target.count_answer) as connection:
        while True:
            await connection.reset(await connection.open_call(STREAM, message))
            await asyncio.sleep(0)


async def _window_zero(target: Target) -> None:
    """Streams that are never read, until the server has ended all."""
    message = _stream_message(200)
    async with connect(target.grpc_port, target.token, 0, target.count_answer) as connection:
        for _ in range(16):
            await connection.open_call(STREAM, message)
        await connection.wait_ended()
        await asyncio.sleep(0.1)


async def _slow_messages(target: Target) -> None:
    """Messages that arrive a byte at a time."""
    message = _stream_message(20)
    async with connect(target.grpc_port, target.token, on_frame=target.count_answer) as connection:
        streams = [await connection.open_call(STREAM, message[:1], end=False) for _ in range(16)]
        for byte in message[1:-1]:
            await asyncio.sleep(0.1)
            await connection.send(*(frame(DATA, 0, stream, bytes((byte,))) for stream in streams))
        await connection.wait_ended()


async def _slow_http(target: Target, head: bytes) -> None:
    """A request whose head or body arrives a byte at a time."""
    reader, writer = await asyncio.open_connection("127.0.0.1", target.http_port)
    try:
        writer.write(head.replace(b"TOKEN", target.token.encode()))
        while not reader.at_eof():
            writer.write(b"a")
            await writer.drain()
            await asyncio.sleep(0.1)
        target.count_answer()
    finally:
        writer.transport.abort()


async def _idle(target: Target) -> None:
    """Connections to both ports that send nothing."""
    writers = []
    try:
        for number in range(1000):
            port = target.http_port if number % 2 else target.grpc_port
            writers.append((await asyncio.open_connection("127.0.0.1", port))[1])
            target.count_answer()
        await asyncio.sleep(60)
    finally:
        for writer in writers:
            writer.transport.abort()


def _stream_message(tokens: int) -> bytes:
    params = pb.Parameters(stopping=pb.StoppingCriteria(max_new_tokens=tokens, min_new_tokens=tokens))
    return grpc_message(stream_request("Once upon a time", params).SerializeToString())


def _tokenize(size: int) -> bytes:
    batch = pb.BatchedTokenizeRequest(return_tokens=True, return_offsets=True)
    batch.requests.add(text="lorem ipsum " * (size // 12))
    return batch.SerializeToString()


def _all(*attacks: Attack) -> Attack:
    async def attack(target: Target) -> None:
        await asyncio.gather(*(each(target) for each in attacks))

    return attack


_FEW = pb.Parameters(stopping=pb.StoppingCriteria(max_new_tokens=2))
_SMALL = batch_request(["a"], _FEW).SerializeToString()
_NO_INPUTS = pb.BatchedGenerationRequest(requests=[pb.GenerationRequest()]).SerializeToString()
_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer TOKEN\r\nContent-Length: 9999\r\n"

ATTACKS: dict[str, tuple[Attack, bool]] = {  # the attack, and whether it has a valid token
    "sparse_refused": (_calls(GENERATE, _SMALL, channels=200, in_flight=1), False),
    "small_tokenize": (_calls(TOKENIZE, _tokenize(24), channels=4, in_flight=24), True),
    "scrape_flood": (_requests("GET", "/metrics", "127.0.0.2", "127.0.0.3", "127.0.0.4"), False),
    "rapid_reset": (partial(_together, 8, _rapid_reset), True),
    "rapid_reset_refused": (partial(_together, 8, _rapid_reset), False),
    "window_zero": (partial(_together, 16, _window_zero), True),
    "slow_messages": (
        _all(
            partial(_together, 16, _slow_messages),
            partial(_together, 50, partial(_slow_http, head=_HEAD)),
            partial(_together, 50, partial(_slow_http, head=_HEAD + b"\r\n")),
        ),
        True,
    ),
    "big_messages": (
        _all(
            _calls(GENERATE, _NO_INPUTS * (_MESSAGE_LIMIT // len(_NO_INPUTS)), channels=4, in_flight=2),
            _calls(TOKENIZE, _tokenize(_MESSAGE_LIMIT), channels=4, in_flight=2),
        ),
        True,
    ),
    "idle_connections": (partial(_together, 8, _idle), False),
    "http_flood": (_requests("POST", "/v1/completions", "127.0.0.1", json={"prompt": "a"}), False),
}


def _attack(name: str, target: Target) -> None:
    """The process of the attackers, which runs on idle CPUs only: it stands for other machines."""
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    os.setsid()  # Linux divides the CPUs between sessions first: this one gets little
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text("10")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    attack, _ = ATTACKS[name]
    asyncio.run(_together(1, attack, target))


@contextlib.contextmanager
def attackers(name: str, target: Target) -> Iterator[None]:
    """Attack until the end of the block."""
    process = _SPAWN.Process(target=_attack, args=(name, target), daemon=True)
    process.start()
    try:
        yield
        assert process.is_alive(), "the attackers have failed"
    finally:
        process.kill()
        process.join()
