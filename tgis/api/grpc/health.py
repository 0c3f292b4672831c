"""`grpc.health.v1`: one state for the process and for the generation service."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from tgis.api.grpc.servicer import GENERATION_SERVICE

Context = grpc.aio.ServicerContext[Any, Any]


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

    def set_serving(self, serving: bool) -> None:
        """Change the state and wake the watchers; ignored after `close`."""
        self._serving = serving and not self._closed
        self._changed.set()
        self._changed = asyncio.Event()

    def close(self) -> None:
        """Stay NOT_SERVING for good and end the watchers' streams, so that none delays the shutdown."""
        self._closed = True
        self.set_serving(False)

    async def Check(  # noqa: N802  # the method's name in the proto
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> health_pb2.HealthCheckResponse:
        """The state of one service; NOT_FOUND for an unknown one."""
        if request.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return self._response(request.service)

    async def List(  # noqa: N802
        self, _request: "health_pb2.HealthListRequest", _context: Context
    ) -> "health_pb2.HealthListResponse":  # missing in older grpcio-health-checking
        """The state of every service."""
        return health_pb2.HealthListResponse(statuses={name: self._response(name) for name in self._services})

    async def Watch(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, _context: Context
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """The current state, then every change; a slow reader may miss short-lived states."""
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
