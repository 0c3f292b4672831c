"""Compressed messages: what gRPC's own client sends, and streams that Python's modules compress."""

import gzip
import random
import zlib
from dataclasses import replace

import grpc
import pytest
from grpc_calls import CONFIG, connected, echo, make_calls, serving
from harness import run_async

from tgis.api.grpc.calls import decompress
from tgis.errors import InvalidRequest

LIMIT = 1 << 16
TEXT = b"\x0a\xff\x01" + random.Random(0).randbytes(100) * 300  # as a message begins


@pytest.mark.parametrize("algorithm", [grpc.Compression.Deflate, grpc.Compression.Gzip])
@run_async
async def test_messages_of_a_client_that_compresses(algorithm: grpc.Compression) -> None:
    config = replace(CONFIG, grpc_max_message_bytes=LIMIT)
    calls = make_calls(config)
    handler = grpc.method_handlers_generic_handler("test.Service", {"Echo": calls.handler("Echo", echo)})
    async with serving(handler, config, calls) as (_, port), connected(port) as channel:
        send = channel.unary_unary("/test.Service/Echo", bytes, bytes)
        assert await send(TEXT, timeout=30, compression=algorithm) == TEXT
        with pytest.raises(grpc.aio.AioRpcError, match=f"{LIMIT}") as caught:
            await send(TEXT * 3, timeout=30, compression=algorithm)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert await send(TEXT, timeout=30, compression=algorithm) == TEXT


@pytest.mark.parametrize("size", [0, 1, LIMIT - 1, LIMIT])
def test_streams_within_the_limit(size: int) -> None:
    for data in (bytes(size), random.Random(size).randbytes(size)):
        for compressed in (gzip.compress(data), zlib.compress(data), zlib.compress(data, 0)):
            assert decompress(compressed, LIMIT) == data


def _lying(data: bytes) -> bytes:
    """A gzip stream that announces one byte."""
    return data[:-4] + (1).to_bytes(4, "little")


BAD = {
    "one byte too many": (gzip.compress(bytes(LIMIT + 1)), "has more than 65536 bytes, decompressed"),
    "deflate, too many": (zlib.compress(bytes(LIMIT + 1)), "has more than 65536 bytes, decompressed"),
    "a bomb": (gzip.compress(bytes(64 << 20)), "has more than 65536 bytes, decompressed"),
    "a bomb that lies": (_lying(gzip.compress(bytes(64 << 20))), "has more than 65536 bytes, decompressed"),
    "cut off": (zlib.compress(TEXT)[:-9], "it is not one whole stream"),
    "two streams": (gzip.compress(b"a") * 2, "it is not one whole stream"),
    "no gzip": (b"\x1f\x8b" + bytes(100), "cannot be decompressed: Error"),
    "no deflate": (b"\x78\x9c" + b"\xff" * 100, "cannot be decompressed: Error"),
}


@pytest.mark.parametrize(("data", "problem"), BAD.values(), ids=BAD)
def test_streams_that_are_refused(data: bytes, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        decompress(data, LIMIT)
