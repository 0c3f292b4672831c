"""The gRPC port from outside: real clients, raw HTTP/2 frames, garbage."""

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import grpc
import grpc_calls
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_calls import connected, echo, make_calls, service
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from harness import run_async
from raw_http2 import HELLO, HELLO_WITHOUT_WINDOW, call_frames, next_frame, next_frame_of, raw_client

from benchmarks.chaos.http2 import ACK, DATA, HEADERS, PING, SETTINGS, frame, grpc_message, window_setting
from tgis.api.grpc import server as grpc_server
from tgis.api.grpc.server import GrpcServer
from tgis.config import Config
from tgis.errors import StartError

MAX_MESSAGE_BYTES = 1 << 16
CONFIG = replace(grpc_calls.CONFIG, grpc_max_message_bytes=MAX_MESSAGE_BYTES)
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


async def hang(_request: bytes, _context: object) -> bytes:
    await asyncio.Event().wait()
    return b""


HANDLER = service(Echo=echo, Hang=hang)


def serving(config: Config = CONFIG, handler: Any = HANDLER) -> AbstractAsyncContextManager[tuple[GrpcServer, int]]:
    return grpc_calls.serving(handler, config)


async def call_echo(channel: grpc.aio.Channel, payload: bytes = b"x") -> Any:
    return await channel.unary_unary("/test.Service/Echo", bytes, bytes)(payload, timeout=30)


@asynccontextmanager
async def health_of(port: int) -> AsyncIterator[health_pb2_grpc.HealthStub]:
    async with connected(port) as channel:
        yield health_pb2_grpc.HealthStub(channel)


# --- listening ---


@run_async
async def test_a_taken_port_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as (_, port):  # two servers never share one
        with pytest.raises(StartError) as caught:
            GrpcServer([], replace(CONFIG, grpc_port=port), make_calls(CONFIG)).bind()
        monkeypatch.setattr(grpc_server, "listen", mock.Mock())  # as if it was free before
        with pytest.raises(StartError, match=f"^cannot listen for gRPC on 127.0.0.1:{port}$"):
            GrpcServer([], replace(CONFIG, grpc_port=port), make_calls(CONFIG)).bind()
    assert str(caught.value) == f"cannot listen for gRPC on 127.0.0.1:{port}: Address already in use"


@run_async
async def test_an_oversize_message_is_resource_exhausted_and_the_connection_lives() -> None:
    async with serving() as (_, port), connected(port) as channel:
        assert await call_echo(channel, bytes(MAX_MESSAGE_BYTES)) == bytes(MAX_MESSAGE_BYTES)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call_echo(channel, bytes(MAX_MESSAGE_BYTES + 1))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await call_echo(channel) == b"x"


@run_async
async def test_a_client_that_compresses_is_told_so() -> None:
    async with serving() as (_, port), connected(port) as channel:
        for algorithm in (grpc.Compression.Deflate, grpc.Compression.Gzip):
            with pytest.raises(grpc.aio.AioRpcError, match="is disabled") as caught:
                await channel.unary_unary("/test.Service/Echo", bytes, bytes)(bytes(1000), compression=algorithm)
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert await call_echo(channel) == b"x"


@run_async
async def test_responses_may_exceed_the_limit_of_requests() -> None:
    async def large(_request: bytes, _context: object) -> bytes:
        return bytes(8 << 20)

    unlimited = ("grpc.max_receive_message_length", -1)
    async with serving(handler=service(Echo=large)) as (_, port), connected(port, unlimited) as channel:
        assert len(await call_echo(channel)) == 8 << 20


@run_async
async def test_metadata_is_limited_in_size_and_not_at_random() -> None:
    async with serving() as (_, port), connected(port) as channel:
        for size in range(9 << 10, 16 << 10, 1 << 10):
            call = channel.unary_unary("/test.Service/Echo", bytes, bytes)
            assert await call(b"x", metadata=[("large", "x" * (size - 500))], timeout=30) == b"x"
        for _ in range(10):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(b"x", metadata=[("large", "x" * (16 << 10))], timeout=30)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@run_async
async def test_max_concurrent_streams_is_announced() -> None:
    async with serving(replace(CONFIG, max_concurrent_requests=7)) as (_, port):
        async with raw_client(port, HELLO) as (reader, _):
            kind, _flags, payload = await next_frame(reader)
        assert kind == SETTINGS
        assert dict(struct.iter_unpack(">HI", payload))[3] == 7 + 128  # SETTINGS_MAX_CONCURRENT_STREAMS


@run_async
async def test_both_sides_may_ping_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server, while a call is silent; clients at any time."""
    monkeypatch.setattr(grpc_server, "KEEPALIVE_MS", 50)
    hanging, asked, answered = call_frames("/test.Service/Hang"), 0, 0
    async with serving() as (_, port), raw_client(port, HELLO, hanging) as (reader, writer):
        writer.write(frame(PING, 0, 0, b"12345678") * 100)
        while asked < 6 or answered < 100:
            kind, flags, payload = await next_frame(reader)
            if kind == PING and flags == ACK:
                answered += 1
            elif kind == PING:
                writer.write(frame(PING, ACK, 0, payload))
                asked += 1


# --- connection age ---


@run_async
async def test_connections_are_closed_once_they_are_old_and_no_call_fails() -> None:
    connections: list[str] = []  # that the calls came over: behind a Service, a new one may lead to another replica

    async def count(_request: bytes, context: Any) -> bytes:
        connections.append(context.peer())
        await asyncio.sleep(0)
        return b""

    aging = replace(CONFIG, grpc_max_connection_age_seconds=1)
    async with serving(aging, service(Count=count)) as (_, port), connected(port) as channel:
        while len(set(connections)) < 3:
            await channel.unary_unary("/test.Service/Count", bytes, bytes)(b"", timeout=30)


# --- health ---


@run_async
async def test_health_of_known_and_unknown_services() -> None:
    async with serving() as (server, port), health_of(port) as health:
        for state, serving_now in ((SERVING, True), (NOT_SERVING, False), (SERVING, True)):
            server.set_serving(serving_now)
            for name in ("", "fmaas.GenerationService"):
                assert (await health.Check(health_pb2.HealthCheckRequest(service=name))).status == state
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health.Check(health_pb2.HealthCheckRequest(service="fmaas.Nothing"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


@run_async
async def test_a_server_starts_as_not_serving() -> None:
    unused = GrpcServer([HANDLER], CONFIG, make_calls(CONFIG))
    unused.bind()
    await unused.stop()  # one that has never started
    server = GrpcServer([], CONFIG, make_calls(CONFIG))
    port = server.bind()
    await server.start()
    async with health_of(port) as health:
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == NOT_SERVING
    await server.stop()


@run_async
async def test_watch_reports_every_change_and_ends_with_the_server() -> None:
    async with serving() as (server, port), health_of(port) as health:
        known = health.Watch(health_pb2.HealthCheckRequest(service="fmaas.GenerationService"))
        unknown = health.Watch(health_pb2.HealthCheckRequest(service="nobody"))
        assert (await known.read()).status == SERVING
        assert (await unknown.read()).status == SERVICE_UNKNOWN
        for state, serving_now in ((NOT_SERVING, False), (SERVING, True)):
            server.set_serving(serving_now)
            assert (await known.read()).status == state
        stopping = asyncio.create_task(server.refuse_calls())
        assert (await known.read()).status == NOT_SERVING
        await server.stop()
        await stopping
        assert grpc.StatusCode.OK not in (await known.code(), await unknown.code())


@run_async
async def test_a_watcher_that_reads_late_gets_the_last_change() -> None:
    watch = call_frames("/grpc.health.v1.Health/Watch")
    async with serving() as (server, port), raw_client(port, HELLO_WITHOUT_WINDOW, watch) as (reader, writer):
        await next_frame_of(reader, HEADERS)  # the first state waits for the client
        server.set_serving(False)
        writer.write(frame(SETTINGS, 0, 0, window_setting(100)))
        for state in (SERVING, NOT_SERVING):
            expected = health_pb2.HealthCheckResponse(status=state).SerializeToString()
            assert await next_frame_of(reader, DATA) == (DATA, grpc_message(expected))


# --- reflection ---

VERSIONS = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")


async def reflect(port: int, version: str, **query: str) -> reflection_pb2.ServerReflectionResponse:
    async with connected(port) as channel:
        method = channel.stream_stream(
            f"/{version}/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        call = method(iter([reflection_pb2.ServerReflectionRequest(**query)]), timeout=30)
        (answer,) = [response async for response in call]
        return answer


@pytest.mark.parametrize("version", VERSIONS)
@run_async
async def test_reflection_describes_every_listed_service_and_no_others(version: str) -> None:
    async with serving() as (_, port):
        listed = await reflect(port, version, list_services="*")
        names = {service.name for service in listed.list_services_response.service}
        assert names == {"fmaas.GenerationService", "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
        for name in names:
            answer = await reflect(port, version, file_containing_symbol=name)
            pool = descriptor_pool.DescriptorPool()
            for file in answer.file_descriptor_response.file_descriptor_proto:
                pool.Add(descriptor_pb2.FileDescriptorProto.FromString(file))
            assert all(method.input_type.fields is not None for method in pool.FindServiceByName(name).methods)
        for symbol in ("fmaas.Nothing", "", "fmaas.", "\0"):
            answer = await reflect(port, version, file_containing_symbol=symbol)
            assert answer.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]
