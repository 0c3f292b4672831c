"""Calls that wait for their clients: bounded in time and in number, whatever the clients do."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import grpc
import grpc_calls
import pytest
from grpc_calls import CONFIG, connected
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from harness import run_async
from raw_http2 import (
    HELLO,
    HELLO_WITHOUT_WINDOW,
    call_frames,
    call_headers,
    half_a_message,
    message_frames,
    next_frame_of,
    raw_client,
)

from benchmarks.chaos.http2 import END_HEADERS, HEADERS, RST_STREAM, frame, header_block
from tgis import limits
from tgis.api.grpc import health as health_module
from tgis.api.grpc import server as server_module
from tgis.api.grpc.calls import GrpcCall, GrpcCalls

GRPC_VERSION = tuple(map(int, grpc.__version__.split(".")[:2]))
SHORT = 1.0  # for attackers, and in parts for honest clients on a busy machine
LONG = 1000.0  # longer than a test may take
INVALID = grpc.StatusCode.INVALID_ARGUMENT
MESSAGE_TIMEOUT = f"the message has not arrived within {SHORT:g} s"


class Service:
    """Answers of any size, and how many calls run."""

    def __init__(self, calls: GrpcCalls) -> None:
        self.calls, self.num_calls, self.counted = calls, 0, Counter[tuple[str, ...]]()
        calls._count = lambda *call: self.counted.update([call])
        methods = {"Unary": calls.handler("Unary", self._unary), "Stream": calls.handler("Stream", self._stream)}
        self.handler = grpc.method_handlers_generic_handler("test.Service", methods)

    @property
    def num_places(self) -> int:
        """How many calls hold a place."""
        return self.calls.admission.calls.total

    async def _unary(self, data: bytes, call: GrpcCall) -> None:
        self.num_calls += 1
        await call.write(data)

    async def _stream(self, data: bytes, call: GrpcCall) -> None:
        self.num_calls += 1
        while True:
            await call.write(data)


@asynccontextmanager
async def serving(**options: Any) -> AsyncIterator[tuple[Service, int]]:
    config = replace(CONFIG, **{"client_timeout_seconds": LONG} | options)
    calls = grpc_calls.make_calls(config)
    service = Service(calls)
    async with grpc_calls.serving(service.handler, config, calls) as (_, port):
        yield service, port


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


async def works(port: int) -> bool:
    async with connected(port) as channel:
        answer: bytes = await channel.unary_unary("/test.Service/Unary", bytes, bytes)(b"still there")
        return answer == b"still there"


# --- clients that do not read ---


@pytest.mark.parametrize("method", ["Unary", "Stream"])
@run_async
async def test_calls_that_nobody_reads_free_their_places(method: str, monkeypatch: Any, caplog: Any) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(limits, "_SPARE_CALLS", 0)
    async with serving(client_timeout_seconds=SHORT, max_concurrent_requests=8) as (service, port):
        limit = 8
        assert await works(port)  # grpc.aio itself holds the first call
        calls = [call_frames(f"/test.Service/{method}", bytes(1000), 2 * index + 1) for index in range(limit)]
        async with raw_client(port, HELLO_WITHOUT_WINDOW, *calls) as (reader, _):
            await until(lambda: service.num_places == limit)
            async with connected(port) as channel:
                call = channel.unary_unary("/test.Service/Unary", bytes, bytes)(b"one too many")
                assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            await until(lambda: service.num_places == 0)
            assert await works(port)  # and the last one
            for _ in range(limit):
                await next_frame_of(reader, RST_STREAM)
        counts = Counter({("grpc", "Unary", "OK"): 2, ("grpc", "Unary", "RESOURCE_EXHAUSTED"): 1})
        counts["grpc", method, "CANCELLED"] = limit
        await until(lambda: service.counted == counts)  # a call ends for its client before it is counted
        assert f"a client has not read for {SHORT:g} s" in caplog.messages


@run_async
async def test_clients_that_disconnect_are_no_errors(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as (service, port):
        methods = ["Unary", "Stream"] * 32
        calls = [call_frames(f"/test.Service/{name}", bytes(1000), 2 * n + 1) for n, name in enumerate(methods)]
        async with raw_client(port, HELLO_WITHOUT_WINDOW, *calls):
            await until(lambda: service.num_places == len(calls))
        await until(lambda: service.num_places == 0)
        assert await works(port)
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


@run_async
async def test_a_call_may_be_silent_once_its_messages_are_read() -> None:
    context: Any = SimpleNamespace(invocation_metadata=tuple, write=mock.AsyncMock())
    with closing(GrpcCall(context, b"", b"", timeout=0.01)) as call:
        await call.write(b"")
        await asyncio.sleep(0.05)  # the call would be cancelled, which is this task
    assert call._timer.cancelled()


# --- clients that do not send their message ---


@pytest.mark.parametrize("sent", [b"", half_a_message()], ids=["headers only", "half a message"])
@run_async
async def test_a_message_must_arrive_in_time(sent: bytes) -> None:
    methods = ("/test.Service/Unary", "/test.Service/Stream", "/grpc.health.v1.Health/Check")
    async with serving(client_timeout_seconds=SHORT) as (service, port), AsyncExitStack() as stack:
        clients = [raw_client(port, HELLO, call_headers(method), sent) for method in methods]
        for reader, _ in [await stack.enter_async_context(client) for client in clients]:
            _, block = await next_frame_of(reader, HEADERS)
            assert MESSAGE_TIMEOUT.encode() in block
            await next_frame_of(reader, RST_STREAM)
        assert service.num_calls == 0
        assert await works(port)


@run_async
async def test_the_status_of_a_late_and_of_an_absent_message() -> None:
    async with serving(client_timeout_seconds=SHORT) as (_, port), connected(port) as channel:
        call = channel.stream_unary("/test.Service/Unary", bytes, bytes)
        late, absent = call(), call(iter([]))  # type: ignore[call-arg]  # stubs
        assert (await absent.code(), await absent.details()) == (INVALID, "the call has no message")
        assert (await late.code(), await late.details()) == (grpc.StatusCode.DEADLINE_EXCEEDED, MESSAGE_TIMEOUT)


# --- metadata ---


def headers(name: str, value: bytes) -> bytes:
    """The start of a call with a header that no library would send."""
    block = header_block("/test.Service/Unary", (name, "x" * len(value))).replace(b"x" * len(value), value)
    return frame(HEADERS, END_HEADERS, 1, block)


@run_async
async def test_metadata_that_is_not_utf8_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    sent = headers("authorization", b"Bearer sesame\xff") + message_frames(b"")
    async with serving() as (service, port), raw_client(port, HELLO, sent):
        await until(lambda: service.num_calls)
    assert "sesame" not in caplog.text


@pytest.mark.parametrize("given", [b"one\ntwo\x01", "één".encode()])
@run_async
async def test_an_id_that_cannot_be_returned_is_refused_before_the_call_runs(given: bytes) -> None:
    sent = headers("x-correlation-id", given) + message_frames(b"")
    async with serving() as (service, port), raw_client(port, HELLO, sent) as (reader, _):
        kind, trailers = await next_frame_of(reader, HEADERS, RST_STREAM)
        assert (kind, b"must be printable ASCII" in trailers, service.num_calls) == (HEADERS, True, 0)


# --- services that anybody may call ---


@run_async
async def test_requests_without_a_token_are_short() -> None:
    async with serving() as (_, port), connected(port) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service="x" * (1 << 20))
        for call in (health.Check(request), health.Watch(request)):
            assert await call.code() is INVALID
            assert await call.details() == "the message has 1048580 bytes, at most 256 allowed"
        query = reflection_pb2.ServerReflectionRequest(file_by_filename="x" * 2000)
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([query]))
        assert await reflection.code() is INVALID
        assert await reflection.details() == "the message has 2003 bytes, at most 1024 allowed"


@run_async
async def test_the_oldest_of_too_many_health_calls_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_module, "MAX_OPEN_CALLS", 2)
    monkeypatch.setattr(server_module, "MAX_REFLECTION_CALLS", 2)
    async with serving() as (_, port), connected(port) as channel:
        health, watchers = health_pb2_grpc.HealthStub(channel), []
        for _ in range(3):  # they have ended
            await health.Check(health_pb2.HealthCheckRequest())
        for _ in range(4):
            watchers.append(health.Watch(health_pb2.HealthCheckRequest()))
            await watchers[-1].read()
        for watcher in watchers[:2]:
            assert await watcher.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert not any(watcher.done() for watcher in watchers[2:])
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        calls = [stub.ServerReflectionInfo() for _ in range(3)]
        assert await calls[-1].code() is grpc.StatusCode.RESOURCE_EXHAUSTED


# --- connections ---


@pytest.mark.parametrize("sent", [b"", HELLO[:20], HELLO[:24]], ids=["nothing", "half a preface", "a preface"])
@run_async
async def test_a_silent_connection_is_closed(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "HANDSHAKE_TIMEOUT_MS", 300)
    async with serving() as (_, port), raw_client(port, sent) as (reader, _):
        await reader.read()  # until the server closes
        assert await works(port)


@pytest.mark.skipif(GRPC_VERSION < (1, 63), reason="this grpcio does not limit connections")
@run_async
async def test_connections_beyond_the_limit_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MAX_CONNECTIONS", 2)
    async with serving() as (_, port), AsyncExitStack() as stack:
        for _ in range(2):
            reader, _ = await stack.enter_async_context(raw_client(port, HELLO))
            await reader.readexactly(9)
        async with raw_client(port, HELLO) as (reader, _):
            assert await reader.read() == b""
        await stack.aclose()
        async with connected(port) as channel:  # gRPC tries again until the server has noticed
            call = channel.unary_unary("/test.Service/Unary", bytes, bytes)(b"x", wait_for_ready=True)
            assert await call == b"x"
