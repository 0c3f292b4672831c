"""`/health` and `/ping` for probes, `/metrics` for Prometheus: without a token, and never waiting for the engine."""

import asyncio
import time
from collections.abc import Awaitable, Callable

from aiohttp import web
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from tgis.api.http.responses import NO_STORE

_COMPRESSED_IN_THREAD = 4096  # bytes


class Health:
    """`unhealthy_reason` is None while healthy."""

    def __init__(self, unhealthy_reason: Callable[[], str | None]) -> None:
        self._unhealthy_reason = unhealthy_reason

    def health_routes(self) -> list[web.RouteDef]:
        """Routes of health checks, also on the ports of the APIs; TGI clients ask `/`."""
        return [*(web.get(path, self.health) for path in ("/", "/health", "/ping")), web.post("/ping", self.health)]

    async def health(self, request: web.Request) -> web.Response:
        """Browsers at `/` are sent to `/ui` if this port has it."""
        routes = (resource.canonical for resource in request.app.router.resources())
        if request.path == "/" and "text/html" in request.headers.get("Accept", "") and "/ui" in routes:
            return web.Response(status=307, headers=NO_STORE | {"Location": "ui"})
        reason = self._unhealthy_reason()
        if reason is None:
            return web.Response()
        return web.json_response({"error": reason, "error_type": "healthcheck"}, status=503)


class Probes(Health):
    """Health, and the metrics: `scrape` returns them as text."""

    def __init__(self, unhealthy_reason: Callable[[], str | None], scrape: Callable[[], Awaitable[bytes]]) -> None:
        super().__init__(unhealthy_reason)
        self._scrape = scrape
        self._scraping = asyncio.Lock()
        self._scraped_at = -1.0
        self._last_scrape = b""

    def routes(self) -> list[web.RouteDef]:
        """Routes of the port for probes."""
        return [*self.health_routes(), web.get("/metrics", self._metrics)]

    async def _metrics(self, _request: web.Request) -> web.Response:
        text = await self._fresh_scrape()
        headers = {"Content-Type": CONTENT_TYPE_PLAIN_0_0_4}
        response = web.Response(body=text, headers=headers, zlib_executor_size=_COMPRESSED_IN_THREAD)
        response.enable_compression()
        return response

    async def _fresh_scrape(self) -> bytes:
        """A scrape that began after the request; requests that arrive during one share the next."""
        arrived = time.monotonic()
        async with self._scraping:
            if self._scraped_at < arrived:
                started = time.monotonic()
                self._last_scrape = await self._scrape()
                self._scraped_at = started
            return self._last_scrape
