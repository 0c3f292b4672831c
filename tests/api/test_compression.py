"""Compressed messages, from real clients and hostile ones."""

import gzip

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from harness import run_async

from tgis.api.grpc.handlers import unary_handler
from tgis.api.grpc.open_calls import OpenCalls
from tgis.api.grpc.server import GrpcServer
from tgis.config import Config
from tgis.pb import generation_pb2 as pb

MAX_BYTES = 1 << 16
CONFIG = Config(model_name="m", bind_address="127.0.0.1", grpc_port=0, grpc_max_message_bytes=MAX_BYTES)
MESSAGES = [b"", b"\x0a\x01a", b"\x0a" * 1000, bytes(range(2, 256)) * 200, b"\x0a" * MAX_BYTES]


async def echo(request: bytes, _context: object) -> bytes:
    return request


async def answer(message: bytes, compression: grpc.Compression | None) -> bytes:
    """Of a server that echoes."""
    calls = OpenCalls(CONFIG)
    handler = grpc.method_handlers_generic_handler("test.Service", {"Echo": unary_handler(calls, echo)})
    server = GrpcServer([handler], CONFIG, calls)
    port = server.bind()
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            method = channel.unary_unary("/test.Service/Echo", bytes, bytes)
            got: bytes = await method(message, compression=compression, timeout=30)
            return got
    finally:
        await server.stop(0)


@pytest.mark.parametrize("compression", grpc.Compression)
@run_async
async def test_clients_may_compress_their_messages(compression: grpc.Compression) -> None:
    for message in MESSAGES:
        assert await answer(message, compression) == message


TOO_LONG = {
    "a byte": (b"\x0a" * (MAX_BYTES + 1), grpc.Compression.Gzip),
    "gzip": (bytes(40 << 20), grpc.Compression.Gzip),
    "zlib": (bytes(40 << 20), grpc.Compression.Deflate),
}
COMPRESSED = gzip.compress(b"text" * 100)
DAMAGED = {"cut off": COMPRESSED[:-10], "changed": COMPRESSED[:20] + bytes(100)}


@pytest.mark.parametrize(("message", "compression"), TOO_LONG.values(), ids=TOO_LONG.keys())
@run_async
async def test_a_message_that_is_too_long_once_decompressed(message: bytes, compression: grpc.Compression) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answer(message, compression)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert caught.value.details() == f"the message has more than {MAX_BYTES} bytes, decompressed"


@pytest.mark.parametrize("message", DAMAGED.values(), ids=DAMAGED.keys())
@run_async
async def test_a_damaged_message(message: bytes) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answer(message, None)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == "the message cannot be decompressed"


def test_no_message_begins_like_a_compressed_one() -> None:
    """0x78, with which zlib begins, is the tag of field 15."""
    requests = [pb.BatchedGenerationRequest, pb.SingleGenerationRequest, pb.BatchedTokenizeRequest, pb.ModelInfoRequest]
    for message in (*requests, health_pb2.HealthCheckRequest, reflection_pb2.ServerReflectionRequest):
        assert 15 not in message.DESCRIPTOR.fields_by_number
