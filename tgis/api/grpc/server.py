"""The gRPC port: limits, TLS, health and reflection around the handlers that it is given."""

import asyncio
import functools
import os
import socket
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from tgis.api.grpc.calls import GrpcCall, GrpcCalls
from tgis.api.grpc.health import HEALTH_SERVICE, HealthServicer
from tgis.api.grpc.parsing import parse
from tgis.api.grpc.private import make_server
from tgis.api.grpc.servicer import GENERATION_SERVICE
from tgis.api.grpc.status import Context
from tgis.config import Config
from tgis.errors import StartError
from tgis.security.tls import Certificates

HANDSHAKE_TIMEOUT_MS = 5_000  # until the first frame of HTTP/2; gRPC's default of two minutes lets silence pile up
WINDOW_BYTES = 256 << 10  # of a stream whose message nobody waits for yet
KEEPALIVE_MS = 60_000  # of inactivity before a ping
MAX_PENDING_CALLS = 10_000  # beyond its default of 1000, gRPC cancels calls of any client at random
MAX_REFLECTION_BYTES = 1024  # of a request
SERVICES = (GENERATION_SERVICE, HEALTH_SERVICE, reflection.SERVICE_NAME)
_REFLECTIONS = ("grpc.reflection.v1.ServerReflection", reflection.SERVICE_NAME)
_NEVER_SECONDS = 1e6
_CLOSE_SECONDS, _CLOSE_TIMES = 0.05, 20  # between closing connections without calls at the end, and how often


class GrpcServer:
    """Owns the `grpc.aio` server; create it inside the event loop."""

    def __init__(
        self,
        handlers: Sequence["grpc.GenericRpcHandler[Any, Any]"],
        config: Config,
        calls: GrpcCalls,
        certificates: Certificates | None = None,
    ) -> None:
        self._host, self._port = config.bind_address, config.grpc_port
        self._certificates = certificates
        self._clients = calls.clients
        self._bound_port: int | None = None
        self._stopped = False
        self._health = HealthServicer()
        handlers = [*handlers, self._health.handler(calls), *_reflection_handlers(calls)]
        self._server = make_server(handlers, _channel_arguments(config, calls), calls.queue)

    def bind(self) -> int:
        """Bind the port, or any free one if it is 0, and return its number; StartError if that fails."""
        address = f"[{self._host}]:{self._port}" if ":" in self._host else f"{self._host}:{self._port}"
        try:
            if self._certificates is None:
                port: int = self._server.add_insecure_port(address)
            else:
                port = self._server.add_secure_port(address, self._certificates.server_credentials())
        except RuntimeError:  # grpcio's, without the reason
            port = 0
        if not port:
            raise StartError(f"cannot listen for gRPC on {address}: {_bind_error(self._host, self._port)}")
        self._bound_port = port
        return port

    async def start(self) -> None:
        """Accept calls; health is NOT_SERVING until `set_serving`."""
        await self._server.start()

    def set_serving(self, serving: bool) -> None:
        """Set the state that the health service reports."""
        self._health.set_serving(serving)

    async def refuse_calls(self) -> None:
        """Report NOT_SERVING, and make clients go elsewhere; ends after `stop`.

        Their new calls are UNAVAILABLE, by the handlers or since the connection is closed. C-core would cancel those on
        their way while it stops, and nobody repeats a call that is CANCELLED: only connections that have long calls see
        it stop before the end. It has no grace of its own: when that of one `stop` of grpcio ends together with
        another, the process crashes.
        """
        self._health.set_serving(False)
        for _ in range(_CLOSE_TIMES):
            await asyncio.sleep(_CLOSE_SECONDS)
            if self._stopped:
                return
            open_calls = (call for call in self._clients.served if isinstance(call, GrpcCall))
            _close_connections(self._bound_port, {call.connection.rpartition(":")[2] for call in open_calls})
        await self._server.stop(_NEVER_SECONDS)

    async def stop(self) -> None:
        """End all calls that are left."""
        self._stopped = True
        _close_connections(self._bound_port, listener=True)
        await self._server.stop(0)


def _reflection_handlers(calls: GrpcCalls) -> "list[grpc.GenericRpcHandler[Any, Any]]":
    """Reflection for all services of this server, under both of its names: v1 has the same messages as v1alpha.

    v1 is not listed, since no file describes it.
    """
    reflect_all: Any = reflection.ReflectionServicer(SERVICES).ServerReflectionInfo

    @functools.lru_cache(maxsize=64)  # all clients ask the same
    def answer(data: bytes) -> bytes:
        requests = iter([parse(data, reflection_pb2.ServerReflectionRequest)])
        (response,) = reflect_all(requests, None)
        serialized: bytes = response.SerializeToString()
        return serialized

    async def reflect(_requests: object, context: Context) -> None:
        async with calls.open(context, "ServerReflectionInfo") as call:
            while (data := await call.next_message(MAX_REFLECTION_BYTES)) is not None:
                await call.write(answer(data))

    methods = {"ServerReflectionInfo": grpc.stream_stream_rpc_method_handler(reflect)}
    return [grpc.method_handlers_generic_handler(name, methods) for name in _REFLECTIONS]


def _channel_arguments(config: Config, calls: GrpcCalls) -> list[tuple[str, int]]:
    age = config.grpc_max_connection_age_seconds
    return [
        *([] if age is None else [("grpc.max_connection_age_ms", age * 1000)]),
        ("grpc.so_reuseport", 0),  # otherwise two servers can share a port without an error
        ("grpc.max_receive_message_length", config.grpc_max_message_bytes),
        ("grpc.compression_enabled_algorithms_bitset", 1),  # none: gRPC would decompress on the event loop, any size
        ("grpc.max_concurrent_streams", calls.max_calls_of_connection),
        ("grpc.max_allowed_incoming_connections", calls.clients.max_connections),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_TIMEOUT_MS),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
        ("grpc.http2.bdp_probe", 0),  # else streams of fast clients may send megabytes before anybody wants them
        ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
        ("grpc.http2.max_ping_strikes", 0),  # else each ping after GOAWAY costs more than the one before
    ]


def _close_connections(port: int | None, but: Collection[str] = (), *, listener: bool = False) -> None:
    """Close the connections to our port, as if their clients did, but those from the ports `but`; also `listener`."""
    for file in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # it is closed meanwhile
            if file.readlink().name.startswith("socket:"):
                with socket.socket(fileno=os.dup(int(file.name))) as ours:
                    if ours.getsockname()[1:2] == (port,) and _closes(ours, but, listener=listener):
                        ours.shutdown(socket.SHUT_RDWR)


def _closes(ours: socket.socket, but: Collection[str], *, listener: bool) -> bool:
    if ours.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return listener
    return str(ours.getpeername()[1]) not in but


def _bind_error(host: str, port: int) -> str:
    """The operating system's reason for a failed bind, which gRPC does not report."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.bind((host, port))
    except OSError as error:
        return error.strerror or str(error)
    return "refused by gRPC"
