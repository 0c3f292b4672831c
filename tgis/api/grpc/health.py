"""`grpc.health.v1`: one state for the process and for the generation service."""

import asyncio
from typing import Any

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from tgis.api.grpc.calls import GrpcCall, GrpcCalls
from tgis.api.grpc.parsing import parse
from tgis.api.grpc.servicer import GENERATION_SERVICE
from tgis.api.grpc.status import Context, abort_with

HEALTH_SERVICE = "grpc.health.v1.Health"
MAX_REQUEST_BYTES = 256

_SERVING, _NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class HealthServicer:
    """Starts as NOT_SERVING; create it inside the event loop.

    Not grpcio-health-checking's servicer: that one writes to watchers under a lock, so a client that stops reading
    blocks every later change of the state.
    """

    def __init__(self) -> None:
        self._services = frozenset({"", GENERATION_SERVICE})
        self._serving = False
        self._closed = False
        self._changed = asyncio.Event()

    def handler(self, calls: GrpcCalls) -> "grpc.GenericRpcHandler[Any, Any]":
        """The handler to register with a server."""
        methods = {
            "Check": calls.unary_handler(self._check, MAX_REQUEST_BYTES),
            "Watch": calls.stream_handler(self._watch, MAX_REQUEST_BYTES),
        }
        if hasattr(health_pb2, "HealthListResponse"):  # missing in older grpcio-health-checking
            methods["List"] = calls.unary_handler(self._list, MAX_REQUEST_BYTES)
        return grpc.method_handlers_generic_handler(HEALTH_SERVICE, methods)

    def set_serving(self, serving: bool) -> None:
        """Change the state and wake the watchers; ignored after `close`."""
        self._serving = serving and not self._closed
        self._changed.set()
        self._changed = asyncio.Event()

    def close(self) -> None:
        """Stay NOT_SERVING for good and end the watchers' streams, so that none delays the shutdown."""
        self._closed = True
        self.set_serving(False)

    async def _check(self, data: bytes, context: Context) -> bytes:
        """The state of one service; NOT_FOUND for an unknown one."""
        if not self._knows(data):
            await abort_with(context, grpc.StatusCode.NOT_FOUND, "unknown service")
        return _serialize(self._state())

    async def _list(self, _data: bytes, _context: Context) -> bytes:
        """The state of every service."""
        return _serialize(health_pb2.HealthListResponse(statuses=dict.fromkeys(self._services, self._state())))

    async def _watch(self, data: bytes, call: GrpcCall) -> None:
        """The current state, then every change; a slow reader may miss short-lived states."""
        known, last = self._knows(data), None
        while True:
            changed, closed = self._changed, self._closed
            state = self._state() if known else health_pb2.HealthCheckResponse(status=_UNKNOWN)
            if state != last:
                await call.write(_serialize(state))
                last = state
            if closed:
                return
            await call.idle(changed.wait())

    def _state(self) -> health_pb2.HealthCheckResponse:
        return health_pb2.HealthCheckResponse(status=_SERVING if self._serving else _NOT_SERVING)

    def _knows(self, data: bytes) -> bool:
        """Whether a request is about a service of this server."""
        return parse(data, health_pb2.HealthCheckRequest).service in self._services


def _serialize(message: Message) -> bytes:
    data: bytes = message.SerializeToString()
    return data
