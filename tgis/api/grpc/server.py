"""The gRPC port: limits, TLS, health and reflection around the handlers that it is given."""

import asyncio
import functools
from collections.abc import Sequence
from typing import Any

import grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from tgis.api.grpc.calls import GrpcCall, GrpcCalls, remember_creators
from tgis.api.grpc.health import HEALTH_SERVICE, HealthServicer
from tgis.api.grpc.parsing import parse
from tgis.api.grpc.servicer import GENERATION_SERVICE
from tgis.api.listen import listen
from tgis.config import Config
from tgis.errors import StartError
from tgis.frontend.admission import Admission, Quota
from tgis.security.tls import Certificates

# Until the first HTTP/2 frame; with gRPC's default of two minutes, silent connections pile up.
HANDSHAKE_TIMEOUT_MS = 5_000
UNREAD_STREAM_WINDOW_BYTES = 256 << 10
KEEPALIVE_MS = 60_000
# Above its default of 1000, gRPC cancels calls of any client at random.
MAX_PENDING_CALLS = 10_000
MAX_CONNECTIONS = 4096
MAX_METADATA_BYTES = 16 << 10
MAX_REFLECTION_BYTES, MAX_REFLECTION_CALLS = 1024, 64
_REFLECTIONS = ("grpc.reflection.v1.ServerReflection", reflection.SERVICE_NAME)
_NEVER_SECONDS = 1e6


class GrpcServer:
    """Owns the `grpc.aio` server; create it inside the event loop."""

    def __init__(
        self,
        handlers: Sequence["grpc.GenericRpcHandler[Any, Any]"],
        config: Config,
        calls: GrpcCalls,
        certificates: Certificates | None = None,
        services: Sequence[str] = (GENERATION_SERVICE,),
    ) -> None:
        """Health and reflection know the `services`."""
        self._host, self._port = config.bind_address, config.grpc_port
        self._certificates = certificates
        self._health = HealthServicer(services)
        listed = (*services, HEALTH_SERVICE, reflection.SERVICE_NAME)
        handlers = [*handlers, self._health.handler(calls), *_reflection_handlers(calls, listed)]
        remember_creators(asyncio.get_running_loop())
        self._server = grpc.aio.server(handlers=handlers, options=_channel_arguments(config, calls.admission))

    def bind(self) -> int:
        """Bind the port, or any free one if it is 0, and return its number; StartError if that fails."""
        listen("gRPC", self._host, self._port).close()  # gRPC does not say why it cannot bind a port
        address = f"[{self._host}]:{self._port}" if ":" in self._host else f"{self._host}:{self._port}"
        try:
            if self._certificates is None:
                return self._server.add_insecure_port(address)
            return self._server.add_secure_port(address, self._certificates.server_credentials())
        except RuntimeError as error:
            raise StartError(f"cannot listen for gRPC on {address}") from error

    async def start(self) -> None:
        """Accept calls; health is NOT_SERVING until `set_serving`."""
        await self._server.start()

    def set_serving(self, serving: bool) -> None:
        """Set the state that the health service reports."""
        self._health.set_serving(serving)

    async def refuse_calls(self) -> None:
        """Report NOT_SERVING and take no more calls; returns once all open ones have ended, or after `stop`.

        C-core cancels the calls that are on their way: clients repeat CANCELLED like UNAVAILABLE. `stop` of grpcio has
        no grace here: when it ends together with another `stop`, the process crashes.
        """
        self._health.set_serving(False)
        await self._server.stop(_NEVER_SECONDS)

    async def stop(self) -> None:
        """End all calls that are left."""
        await self._server.stop(0)


def _reflection_handlers(calls: GrpcCalls, services: Sequence[str]) -> "list[grpc.GenericRpcHandler[Any, Any]]":
    """Reflection for the services of this server, under both of its names: v1 has the same messages as v1alpha.

    v1 is not listed, since no file describes it.
    """
    reflect_all: Any = reflection.ReflectionServicer(services).ServerReflectionInfo

    @functools.lru_cache(maxsize=64)  # all clients ask the same
    def answer(data: bytes) -> bytes:
        requests = iter([parse(data, reflection_pb2.ServerReflectionRequest)])
        (response,) = reflect_all(requests, None)
        serialized: bytes = response.SerializeToString()
        return serialized

    places = Quota("open reflection calls", MAX_REFLECTION_CALLS, MAX_REFLECTION_CALLS // 2)

    async def reflect(call: GrpcCall) -> None:
        with places.hold(call.client, 1):
            while (data := await call.read(MAX_REFLECTION_BYTES)) is not None:
                await call.write(answer(data))

    methods = {"ServerReflectionInfo": calls.stream_handler("ServerReflectionInfo", reflect)}
    return [grpc.method_handlers_generic_handler(name, methods) for name in _REFLECTIONS]


def _channel_arguments(config: Config, admission: Admission) -> list[tuple[str, int]]:
    age = config.grpc_max_connection_age_seconds
    return [
        *([] if age is None else [("grpc.max_connection_age_ms", age * 1000)]),
        ("grpc.so_reuseport", 0),  # else two servers could share a port without an error
        ("grpc.max_receive_message_length", config.grpc_max_message_bytes),
        ("grpc.compression_enabled_algorithms_bitset", 1),  # none: gRPC would decompress on the event loop, any size
        ("grpc.max_concurrent_streams", admission.calls.limit),
        ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_TIMEOUT_MS),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
        ("grpc.http2.bdp_probe", 0),  # else fast clients may send megabytes before the call is read
        ("grpc.http2.lookahead_bytes", UNREAD_STREAM_WINDOW_BYTES),
        ("grpc.http2.max_ping_strikes", 0),  # else each ping after GOAWAY costs more than the one before
    ]
