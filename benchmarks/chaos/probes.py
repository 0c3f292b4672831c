"""Probes of single limits: what is too much is refused, a client that is too slow is ended, a drain loses nothing."""

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

import grpc.aio

from benchmarks.chaos.attacks import GENERATE, STREAM, Target, open_channel
from benchmarks.chaos.http2 import connect, grpc_message
from benchmarks.serving import Server
from benchmarks.soak.requests import batch_request, stream_request
from tgis.pb import generation_pb2 as pb
from tgis.pb.generation_pb2_grpc import GenerationServiceStub

GRACE_SECONDS = 20
_STREAMS, _TOKENS = 20, 60
_TOO_MANY_BYTES = 8 << 20
_MANY_INPUTS = batch_request(["a"] * 5000, pb.Parameters())
_REFUSALS = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED

Probe = Callable[[Target], Awaitable[object]]


async def _expect_refusal(target: Target, message: bytes) -> None:
    async with open_channel(target.grpc_port) as channel:
        method = channel.unary_unary(GENERATE, lambda data: data, lambda data: data)
        code = await method(message, metadata=target.metadata).code()
        assert code in _REFUSALS, code


async def _oversized_body(target: Target) -> None:
    status = await _post(target, _TOO_MANY_BYTES, bytes(_TOO_MANY_BYTES))
    assert b" 413 " in status, status


async def _post(target: Target, length: int, body: bytes = b"") -> bytes:
    """The status line of the answer to a request with this Content-Length."""
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {target.token}\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", target.http_port)
    try:
        writer.write(f"{head}Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n".encode() + body)
        return await reader.readline()
    finally:
        writer.transport.abort()


async def _half_message(target: Target) -> None:
    async with connect(target.grpc_port, target.token) as connection:
        await connection.open_call(GENERATE, grpc_message(bytes(1000))[:500], end=False)
        await connection.wait_ended()


async def _unread_stream(target: Target) -> None:
    stopping = pb.StoppingCriteria(max_new_tokens=_TOKENS, min_new_tokens=_TOKENS)
    message = stream_request("a", pb.Parameters(stopping=stopping)).SerializeToString()
    async with connect(target.grpc_port, target.token, window=0) as connection:
        await connection.open_call(STREAM, grpc_message(message))
        await connection.wait_ended()


EXCESSIVE: dict[str, Probe] = {
    "oversized message": partial(_expect_refusal, message=bytes(_TOO_MANY_BYTES)),
    "too many inputs": partial(_expect_refusal, message=_MANY_INPUTS.SerializeToString()),
    "oversized body": _oversized_body,
}
SLOW: dict[str, Probe] = {
    "half a message": _half_message,
    "unread stream": _unread_stream,
    "slow body": partial(_post, length=1000),
}


async def longest(probe: Probe, target: Target, until: float, give_up: float) -> float:
    """The longest time of a probe in seconds, `give_up` if one goes wrong; it is repeated until the deadline."""
    slowest = 0.0
    while (started := time.monotonic()) < until:
        try:
            async with asyncio.timeout(give_up):
                await probe(target)
        except* (OSError, EOFError, TimeoutError):  # closed connections are ends
            pass
        except* AssertionError as errors:
            print(probe, *errors.exceptions, file=sys.stderr)
            slowest = give_up
        slowest = max(slowest, time.monotonic() - started)
        await asyncio.sleep(0.5)
    return slowest


async def drain(server: Server, target: Target) -> tuple[int, int | None]:
    """Stop a server while it answers streams: how many of these are lost, and the exit code, None if it hangs."""
    stopping = pb.StoppingCriteria(max_new_tokens=_TOKENS, min_new_tokens=_TOKENS)
    request = stream_request("abc", pb.Parameters(stopping=stopping))
    async with open_channel(target.grpc_port) as channel:
        stub = GenerationServiceStub(channel)
        calls = [stub.GenerateStream(request, metadata=target.metadata) for _ in range(_STREAMS)]
        streams = [aiter(call) for call in calls]
        first = await asyncio.gather(*(_text(stream, 1) for stream in streams))
        server.process.terminate()
        rest = await asyncio.gather(*map(_text, streams))
    texts = [begin + end for begin, end in zip(first, rest, strict=True)]
    try:
        code = await asyncio.to_thread(server.process.wait, GRACE_SECONDS + 10)
    except subprocess.TimeoutExpired:
        return _STREAMS, None
    return sum(text != ("abc" * _TOKENS)[:_TOKENS] for text in texts), code


async def _text(messages: AsyncIterator[pb.GenerationResponse], least: int = 1 << 20) -> str:
    """Text of a stream until its end, or until there are `least` characters."""
    text = ""
    with contextlib.suppress(grpc.aio.AioRpcError):
        async for message in messages:
            text += message.text
            if len(text) >= least:
                break
    return text
