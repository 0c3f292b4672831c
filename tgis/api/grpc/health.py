"""`grpc.health.v1`: one state for the process and for the generation service."""

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from tgis.api.grpc.calls import GrpcCall, GrpcCalls
from tgis.api.grpc.parsing import parse
from tgis.api.grpc.servicer import GENERATION_SERVICE
from tgis.api.grpc.status import abort_with

HEALTH_SERVICE = "grpc.health.v1.Health"
MAX_REQUEST_BYTES = 256

_Response = health_pb2.HealthCheckResponse
_SERVING: bytes = _Response(status=_Response.SERVING).SerializeToString()
_NOT_SERVING: bytes = _Response(status=_Response.NOT_SERVING).SerializeToString()
_UNKNOWN: bytes = _Response(status=_Response.SERVICE_UNKNOWN).SerializeToString()


class HealthServicer:
    """Starts as NOT_SERVING; create it inside the event loop.

    Not grpcio-health-checking's servicer: that one writes to watchers under a lock, so a client that stops reading
    blocks every later change of the state.
    """

    def __init__(self) -> None:
        self._state = _NOT_SERVING
        self._changed = asyncio.Event()

    def handler(self, calls: GrpcCalls) -> "grpc.GenericRpcHandler[Any, Any]":
        """The handler to register with a server."""
        methods = {
            "Check": calls.handler("Check", self._check, public=True, max_bytes=MAX_REQUEST_BYTES),
            "Watch": calls.handler("Watch", self._watch, stream=True, public=True, max_bytes=MAX_REQUEST_BYTES),
        }
        return grpc.method_handlers_generic_handler(HEALTH_SERVICE, methods)

    def set_serving(self, serving: bool) -> None:
        """Change the state and wake the watchers."""
        self._state = _SERVING if serving else _NOT_SERVING
        self._changed.set()
        self._changed = asyncio.Event()

    async def _check(self, data: bytes, call: GrpcCall) -> bytes:
        """The state of one service; NOT_FOUND for an unknown one."""
        if not self._knows(data):
            await abort_with(call.context, grpc.StatusCode.NOT_FOUND, "unknown service")
        return self._state

    async def _watch(self, data: bytes, call: GrpcCall) -> None:
        """The current state, then every change; a slow reader may miss short-lived states."""
        known, last = self._knows(data), None
        while True:
            changed = self._changed
            state = self._state if known else _UNKNOWN
            if state != last:
                await call.write(state)
                last = state
            await call.idle(changed.wait())

    def _knows(self, data: bytes) -> bool:
        """Whether a request is about a service of this server."""
        return parse(data, health_pb2.HealthCheckRequest).service in ("", GENERATION_SERVICE)
