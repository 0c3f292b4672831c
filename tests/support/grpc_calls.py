"""A gRPC port in the process of a test, and what it shares with its handlers."""

from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import grpc

from tgis.api.grpc.calls import GrpcCalls
from tgis.api.grpc.server import GrpcServer
from tgis.config import Config
from tgis.limits import admission
from tgis.security.tls import Certificates

CONFIG = Config(model_name="m", bind_address="127.0.0.1", grpc_port=0)
OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]


def make_calls(config: Config) -> GrpcCalls:
    return GrpcCalls(config, admission(config))


async def echo(request: bytes, _context: object) -> bytes:
    return request


def service(**methods: Callable[[bytes, Any], Coroutine[Any, Any, bytes]]) -> Any:
    """A handler of unary methods on raw bytes."""
    handlers = {name: grpc.unary_unary_rpc_method_handler(method) for name, method in methods.items()}
    return grpc.method_handlers_generic_handler("test.Service", handlers)


@asynccontextmanager
async def serving(
    handler: Any, config: Config = CONFIG, calls: GrpcCalls | None = None, certificates: Certificates | None = None
) -> AsyncIterator[tuple[GrpcServer, int]]:
    """The server and its port; stopped at the end of the block."""
    server = GrpcServer([handler], config, calls or make_calls(config), certificates)
    port = server.bind()
    await server.start()
    server.set_serving(True)
    try:
        yield server, port
    finally:
        await server.stop()


@asynccontextmanager
async def connected(port: int, *options: tuple[str, int]) -> AsyncIterator[grpc.aio.Channel]:
    """A connection that no other client of the test shares."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", [*OWN_CONNECTION, *options]) as channel:
        yield channel
