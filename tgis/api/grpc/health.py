"""`grpc.health.v1`: one state for the process and for each of its services."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from tgis.api.grpc.calls import GrpcCall, GrpcCalls
from tgis.api.grpc.parsing import parse
from tgis.errors import Overloaded

HEALTH_SERVICE = "grpc.health.v1.Health"
MAX_REQUEST_BYTES = 256
MAX_OPEN_CALLS = 1024

_Response = health_pb2.HealthCheckResponse
_SERVING: bytes = _Response(status=_Response.SERVING).SerializeToString()
_NOT_SERVING: bytes = _Response(status=_Response.NOT_SERVING).SerializeToString()
_UNKNOWN: bytes = _Response(status=_Response.SERVICE_UNKNOWN).SerializeToString()


class HealthServicer:
    """Starts as NOT_SERVING; create it inside the event loop.

    Not grpcio-health-checking's servicer: that one writes to watchers under a lock, so a client that stops reading
    blocks every later change of the state.
    """

    def __init__(self, services: Sequence[str]) -> None:
        self._services = ("", *services)
        self._open: dict[asyncio.Timeout, None] = {}  # oldest first
        self._state = _NOT_SERVING
        self._changed = asyncio.Event()

    def handler(self, calls: GrpcCalls) -> "grpc.GenericRpcHandler[Any, Any]":
        """The handler to register with a server."""
        methods = {
            "Check": calls.stream_handler("Check", self._check, public=True),
            "Watch": calls.stream_handler("Watch", self._watch, public=True),
        }
        return grpc.method_handlers_generic_handler(HEALTH_SERVICE, methods)

    def set_serving(self, serving: bool) -> None:
        """Change the state and wake the watchers."""
        self._state = _SERVING if serving else _NOT_SERVING
        self._changed.set()
        self._changed = asyncio.Event()

    async def _check(self, call: GrpcCall) -> None:
        """The state of one service; NOT_FOUND for an unknown one."""
        async with self._place():
            if not await self._asks_for_known_service(call):
                await call.context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
            await call.write(self._state)

    async def _watch(self, call: GrpcCall) -> None:
        """The current state, then every change; a slow reader may miss short-lived states."""
        async with self._place():
            known, last = await self._asks_for_known_service(call), None
            while True:
                changed = self._changed
                state = self._state if known else _UNKNOWN
                if state != last:
                    await call.write(state)
                    last = state
                await changed.wait()

    @asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        """Hold a place; if all are taken, the oldest call ends, so that no caller without a token fails a probe."""
        if len(self._open) >= MAX_OPEN_CALLS:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.reschedule(0)
        try:
            async with asyncio.timeout(None) as until:
                self._open[until] = None
                try:
                    yield
                finally:
                    self._open.pop(until, None)
        except TimeoutError:
            raise Overloaded(f"more than {MAX_OPEN_CALLS} health calls are open") from None

    async def _asks_for_known_service(self, call: GrpcCall) -> bool:
        data = await call.read(MAX_REQUEST_BYTES) or b""
        return parse(data, health_pb2.HealthCheckRequest).service in self._services
