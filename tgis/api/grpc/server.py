"""The gRPC port: limits, TLS, health and reflection around handlers that others write.

It knows nothing about generation; what is served, and when it is healthy, is told to it.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, json_format
from google.protobuf.descriptor import FileDescriptor
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

from tgis.errors import StartError
from tgis.pb import generation_pb2
from tgis.security.bearer import BearerAuthInterceptor, TokenFile
from tgis.security.tls import Certificates, TlsFiles

GENERATION_SERVICE = "fmaas.GenerationService"
HEALTH_SERVICE = "grpc.health.v1.Health"
REFLECTION_V1 = "grpc.reflection.v1.ServerReflection"
REFLECTION_V1ALPHA = "grpc.reflection.v1alpha.ServerReflection"

Context = grpc.aio.ServicerContext[Any, Any]

MIN_CLIENT_PING_MS = 5_000  # gRPC's own is five minutes and punishes clients with a usual keepalive


@dataclass(frozen=True, slots=True)
class GrpcServerOptions:
    """Where to listen, and the limits of what a client may do."""

    host: str
    port: int  # 0 takes any free one
    max_message_bytes: int  # received; what is sent has no limit
    max_concurrent_streams: int  # per connection
    keepalive_seconds: float  # between pings to a silent client, during long calls too
    tls: TlsFiles | None = None
    tokens: Path | None = None  # a file of bearer tokens


class GrpcServer:
    """Owns the gRPC server; to be made inside the event loop."""

    def __init__(self, handlers: Sequence["grpc.GenericRpcHandler[Any, Any]"], options: GrpcServerOptions) -> None:
        self._options = options
        self._health = HealthServicer()
        interceptors = [BearerAuthInterceptor(TokenFile(options.tokens))] if options.tokens else []
        arguments = _channel_arguments(options)
        self._server = grpc.aio.server(handlers=handlers, interceptors=interceptors, options=arguments)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        _add_reflection(self._server)

    def bind(self) -> int:
        """Takes the port and returns its number; raises StartError for a taken port or unusable TLS files."""
        host = self._options.host
        address = f"[{host}]:{self._options.port}" if ":" in host else f"{host}:{self._options.port}"
        try:
            if self._options.tls is None:
                return self._server.add_insecure_port(address)
            credentials = Certificates(self._options.tls).server_credentials()
            return self._server.add_secure_port(address, credentials)
        except RuntimeError as error:
            reason = _bind_error(host, self._options.port)
            raise StartError(f"cannot listen for gRPC on {address}: {reason}") from error

    async def start(self) -> None:
        """Begins to answer calls, with a health of NOT_SERVING."""
        await self._server.start()

    def set_serving(self, serving: bool) -> None:
        """Tells the health service what to say."""
        self._health.set_serving(serving)

    async def stop(self, grace: float) -> None:
        """NOT_SERVING for good, no new calls, and after `grace` seconds an end to those still running."""
        self._health.close()
        await self._server.stop(grace)


class HealthServicer:
    """`grpc.health.v1`: one state for the process and for the generation service.

    Not grpcio-health-checking's servicer: that one writes to watchers under a lock, so that a client that
    stops reading freezes the state for everybody.
    """

    def __init__(self) -> None:
        self._services = frozenset({"", GENERATION_SERVICE})
        self._serving = False
        self._closed = False
        self._changed = asyncio.Event()

    def set_serving(self, serving: bool) -> None:
        """Changes the state and tells the watchers, until `close`."""
        self._serving = serving and not self._closed
        self._changed.set()
        self._changed = asyncio.Event()

    def close(self) -> None:
        """NOT_SERVING for good; watchers are told and their streams end, so that none holds up the stop."""
        self._closed = True
        self.set_serving(False)

    async def Check(  # noqa: N802  # the method's name in the proto
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> health_pb2.HealthCheckResponse:
        """The state of one service; NOT_FOUND for one that is not here."""
        if request.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return self._response(request.service)

    async def List(  # noqa: N802
        self, _request: "health_pb2.HealthListRequest", _context: Context
    ) -> "health_pb2.HealthListResponse":  # unknown to older grpcio-health-checking
        """The state of every service."""
        return health_pb2.HealthListResponse(statuses={name: self._response(name) for name in self._services})

    async def Watch(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, _context: Context
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """The state now and whenever it changes; a slow reader may miss states that did not last."""
        last = None
        while True:
            changed, closed = self._changed, self._closed
            response = self._response(request.service)
            if response != last:
                yield response
                last = response
            if closed:
                return
            await changed.wait()

    def _response(self, service: str) -> health_pb2.HealthCheckResponse:
        response = health_pb2.HealthCheckResponse
        if service not in self._services:
            return response(status=response.SERVICE_UNKNOWN)
        return response(status=response.SERVING if self._serving else response.NOT_SERVING)


def _channel_arguments(options: GrpcServerOptions) -> list[tuple[str, int]]:
    return [
        ("grpc.so_reuseport", 0),  # else two servers share a port in silence
        ("grpc.max_receive_message_length", options.max_message_bytes),
        ("grpc.max_concurrent_streams", options.max_concurrent_streams),
        ("grpc.keepalive_time_ms", int(options.keepalive_seconds * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", MIN_CLIENT_PING_MS),
    ]


def _bind_error(host: str, port: int) -> str:
    """The operating system's reason for a failed bind, which gRPC keeps to itself."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.bind((host, port))
    except OSError as error:
        return error.strerror or str(error)
    return "refused by gRPC"


def _add_reflection(server: grpc.aio.Server) -> None:
    """Reflection under both of its names: grpcio-reflection has v1alpha only, v1 has the same messages."""
    names = [GENERATION_SERVICE, HEALTH_SERVICE, REFLECTION_V1, REFLECTION_V1ALPHA]
    servicer = reflection.aio.ReflectionServicer(names, _descriptor_pool())  # type: ignore[attr-defined]  # stubs
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)
    method = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    handler = grpc.method_handlers_generic_handler(REFLECTION_V1, {"ServerReflectionInfo": method})
    server.add_generic_rpc_handlers([handler])


def _descriptor_pool() -> descriptor_pool.DescriptorPool:
    """The files of what is served, and nothing else that happens to be loaded."""
    alpha = _file_proto(reflection_pb2.DESCRIPTOR)
    v1 = json_format.MessageToJson(alpha).replace("v1alpha", "v1")
    pool = descriptor_pool.DescriptorPool()
    for file in (_file_proto(generation_pb2.DESCRIPTOR), _file_proto(health_pb2.DESCRIPTOR), alpha):
        pool.Add(file)
    pool.Add(json_format.Parse(v1, descriptor_pb2.FileDescriptorProto()))
    return pool


def _file_proto(descriptor: FileDescriptor) -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto()
    descriptor.CopyToProto(file)
    return file
