"""`grpc.health.v1`: one state for the process and for the generation service."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from tgis.api.grpc.calls import GrpcCall, GrpcCalls
from tgis.api.grpc.parsing import parse
from tgis.api.grpc.servicer import GENERATION_SERVICE
from tgis.api.grpc.status import Context
from tgis.frontend.admission import Quota

HEALTH_SERVICE = "grpc.health.v1.Health"
MAX_REQUEST_BYTES = 256
MAX_OPEN_CALLS, MAX_CALLS_PER_ADDRESS = 1024, 256

_Response = health_pb2.HealthCheckResponse
_SERVING: bytes = _Response(status=_Response.SERVING).SerializeToString()
_NOT_SERVING: bytes = _Response(status=_Response.NOT_SERVING).SerializeToString()
_UNKNOWN: bytes = _Response(status=_Response.SERVICE_UNKNOWN).SerializeToString()


class HealthServicer:
    """Starts as NOT_SERVING; create it inside the event loop.

    Not grpcio-health-checking's servicer: that one writes to watchers under a lock, so a client that stops reading
    blocks every later change of the state.
    """

    def __init__(self, calls: GrpcCalls) -> None:
        self._calls = calls
        self._places = Quota("open health calls", MAX_OPEN_CALLS, MAX_CALLS_PER_ADDRESS)
        self._state = _NOT_SERVING
        self._changed = asyncio.Event()

    def handler(self) -> "grpc.GenericRpcHandler[Any, Any]":
        """The handler to register with a server."""
        methods = {
            "Check": grpc.stream_stream_rpc_method_handler(self._check),
            "Watch": grpc.stream_stream_rpc_method_handler(self._watch),
        }
        return grpc.method_handlers_generic_handler(HEALTH_SERVICE, methods)

    def set_serving(self, serving: bool) -> None:
        """Change the state and wake the watchers."""
        self._state = _SERVING if serving else _NOT_SERVING
        self._changed.set()
        self._changed = asyncio.Event()

    async def _check(self, _requests: object, context: Context) -> None:
        """The state of one service; NOT_FOUND for an unknown one."""
        async with self._open(context, "Check") as call:
            if not await self._asks_for_known_service(call):
                await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
            await call.write(self._state)

    async def _watch(self, _requests: object, context: Context) -> None:
        """The current state, then every change; a slow reader may miss short-lived states."""
        async with self._open(context, "Watch") as call:
            known, last = await self._asks_for_known_service(call), None
            while True:
                changed = self._changed
                state = self._state if known else _UNKNOWN
                if state != last:
                    await call.write(state)
                    last = state
                await changed.wait()

    @asynccontextmanager
    async def _open(self, context: Context, name: str) -> AsyncIterator[GrpcCall]:
        async with self._calls.open(context, name, public=True) as call:
            with self._places.hold(call.address.encode(), 1):
                yield call

    async def _asks_for_known_service(self, call: GrpcCall) -> bool:
        data = await call.read(MAX_REQUEST_BYTES) or b""
        return parse(data, health_pb2.HealthCheckRequest).service in ("", GENERATION_SERVICE)
