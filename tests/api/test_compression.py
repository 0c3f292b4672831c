"""Compressed messages, which a client's gRPC can make of large ones."""

import grpc
import pytest
from grpc_calls import connected, echo, service, serving
from harness import run_async


@pytest.mark.parametrize("algorithm", [grpc.Compression.Deflate, grpc.Compression.Gzip])
@run_async
async def test_a_client_that_compresses_is_told_so(algorithm: grpc.Compression) -> None:
    async with serving(service(Echo=echo)) as (_, port), connected(port) as channel:
        send = channel.unary_unary("/test.Service/Echo", bytes, bytes)
        with pytest.raises(grpc.aio.AioRpcError, match="is disabled") as caught:
            await send(bytes(1000), timeout=30, compression=algorithm)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert await send(b"plain", timeout=30) == b"plain"
