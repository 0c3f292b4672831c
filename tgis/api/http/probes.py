"""`/health` and `/ping` for probes, `/metrics` for Prometheus, `/debug/batch` for operators.

The first three need no token and never wait for the engine. The last asks it, and is off by default.
"""

import asyncio
from collections.abc import Awaitable, Callable

from aiohttp import web
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from tgis.api.http.auth import HttpAuth
from tgis.api.http.errors import HttpError
from tgis.api.http.pages import batch
from tgis.api.http.pages.page import NO_STORE
from tgis.errors import Unavailable
from tgis.ipc.messages import BatchState

_BATCH_HEADERS = NO_STORE | {"Refresh": "2"}  # seconds, after which a browser asks again
_COMPRESSED_IN_THREAD = 4096  # bytes
MAX_WAITING = 64  # requests for the next scrape; further ones get the last


class Probes:
    """`unhealthy_reason` is None while healthy, `scrape` returns the metrics as text; it runs in a thread.

    `batch_state` returns the state of the batch or raises Unavailable, soon; without it /debug/batch is 404.
    """

    def __init__(
        self,
        unhealthy_reason: Callable[[], str | None],
        scrape: Callable[[], bytes],
        auth: HttpAuth,
        batch_state: Callable[[], Awaitable[BatchState]] | None = None,
    ) -> None:
        self._unhealthy_reason = unhealthy_reason
        self._scrape = scrape
        self._auth = auth
        self._batch_state = batch_state
        self._scraping = asyncio.Lock()
        self._next_scrape: asyncio.Task[bytes] | None = None
        self._last_scrape: bytes | None = None
        self._num_waiting = 0

    def health_routes(self) -> list[web.RouteDef]:
        """Routes of health checks, which ports of the APIs have, too; clients of TGI ask `/`."""
        return [web.get(path, self.health) for path in ("/", "/health", "/ping")]

    def routes(self) -> list[web.RouteDef]:
        """Routes in the clear, without a token."""
        off = [web.get("/debug/batch", _debug_is_off)] if self._batch_state is None else []
        return [*self.health_routes(), web.get("/metrics", self._metrics), *off]

    def debug_routes(self) -> list[web.RouteDef]:
        """Routes that take a token, where one is needed."""
        return [] if self._batch_state is None else [web.get("/debug/batch", self._debug_batch)]

    async def health(self, request: web.Request) -> web.Response:
        """Browsers at `/` are sent to the page for them, where that is served."""
        served = (resource.canonical for resource in request.app.router.resources())
        if request.path == "/" and _accepts_html(request) and "/ui" in served:
            return web.Response(status=307, headers=NO_STORE | {"Location": "ui"})
        reason = self._unhealthy_reason()
        if reason is None:
            return web.Response()
        return web.json_response({"error": reason, "error_type": "healthcheck"}, status=503)

    async def _metrics(self, request: web.Request) -> web.Response:
        headers = {"Content-Type": CONTENT_TYPE_PLAIN_0_0_4}
        response = web.Response(body=await self._shared(), headers=headers, zlib_executor_size=_COMPRESSED_IN_THREAD)
        if "gzip" in request.headers.get("Accept-Encoding", ""):
            response.enable_compression(web.ContentCoding.gzip)
        return response

    async def _shared(self) -> bytes:
        """The next scrape, which all requests that wait for it share; the last one if too many do."""
        if self._last_scrape is not None and self._num_waiting >= MAX_WAITING:
            return self._last_scrape
        if self._next_scrape is None:
            self._next_scrape = asyncio.create_task(self._scrape_next())
        self._num_waiting += 1
        try:
            return await asyncio.shield(self._next_scrape)
        finally:
            self._num_waiting -= 1

    async def _scrape_next(self) -> bytes:
        async with self._scraping:
            self._next_scrape = None
            self._last_scrape = await asyncio.to_thread(self._scrape)
            return self._last_scrape

    async def _debug_batch(self, request: web.Request) -> web.Response:
        """HTML for browsers, JSON for other clients; errors are JSON."""
        assert self._batch_state is not None
        try:
            self._auth.check(request)
            state = await self._batch_state()
        except (Unavailable, HttpError) as error:
            status = 503 if isinstance(error, Unavailable) else error.status
            return web.json_response({"error": str(error)}, status=status, headers=_BATCH_HEADERS)
        if _accepts_html(request):
            return batch.render_page(state).response(_BATCH_HEADERS)
        return web.Response(text=batch.render_json(state), content_type="application/json", headers=_BATCH_HEADERS)


async def _debug_is_off(_request: web.Request) -> web.Response:
    body = {"error": "/debug/batch is off, DEBUG_BATCH=true turns it on", "error_type": "not_found"}
    return web.json_response(body, status=404)


def _accepts_html(request: web.Request) -> bool:
    return "text/html" in request.headers.get("Accept", "")
