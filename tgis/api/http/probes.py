"""`/health` and `/ping` for probes, `/metrics` for Prometheus, `/debug/batch` for operators.

The first three need no token and never wait for the engine. The last asks it, and is off by default.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterable

from aiohttp import web
from aiohttp.typedefs import Handler
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from tgis.api.clients import Quota
from tgis.api.http.auth import HttpAuth
from tgis.api.http.operations import HttpError
from tgis.api.http.pages import batch
from tgis.api.http.pages.page import NO_STORE
from tgis.errors import Overloaded, Unavailable
from tgis.ipc.messages import BatchState

_BATCH_HEADERS = NO_STORE | {"Refresh": "2"}  # seconds, after which a browser asks again
_COMPRESSED_IN_THREAD = 4096  # bytes
MAX_WAITING = 64  # requests, half of them of one address
MAX_SCRAPE_SHARE = 0.1  # of the time: a scrape takes about 25 ms in 60 parts, longer where the event loop is busy
MAX_SCRAPE_PAUSE = 3.0  # seconds from the beginning of a scrape to that of the next


class Probes:
    """`unhealthy_reason` is None while healthy, `scrape` yields the metrics as text.

    `batch_state` returns the state of the batch or raises Unavailable, soon; without it /debug/batch is 404.
    """

    def __init__(
        self,
        unhealthy_reason: Callable[[], str | None],
        scrape: Callable[[], Iterable[bytes]],
        auth: HttpAuth,
        batch_state: Callable[[], Awaitable[BatchState]] | None = None,
    ) -> None:
        self._unhealthy_reason = unhealthy_reason
        self._scrape = scrape
        self._auth = auth
        self._batch_state = batch_state
        self._waiting = Quota(MAX_WAITING, MAX_WAITING // 2, "{} requests wait", "{} requests of this client wait")
        self._scraping = asyncio.Lock()
        self._scrape_due = -math.inf
        self._next_scrape: asyncio.Task[bytes] | None = None

    def health_routes(self) -> list[web.RouteDef]:
        """Routes of health checks, which ports of the APIs have, too; clients of TGI ask `/`."""
        return [web.get(path, self.health) for path in ("/", "/health", "/ping")]

    def routes(self) -> list[web.RouteDef]:
        """Routes in the clear, without a token."""
        off = [web.get("/debug/batch", _debug_is_off)] if self._batch_state is None else []
        return [*self.health_routes(), web.get("/metrics", self._limited(self._metrics)), *off]

    def debug_routes(self) -> list[web.RouteDef]:
        """Routes that take a token, where one is needed."""
        return [] if self._batch_state is None else [web.get("/debug/batch", self._limited(self._debug_batch))]

    def _limited(self, handle: Callable[[web.Request], Awaitable[web.Response]]) -> Handler:
        """Let only some requests wait: their connections make no room for others."""

        async def respond(request: web.Request) -> web.Response:
            client = (request.remote or "").encode()
            try:
                self._waiting.take(client, 1)
            except Overloaded as error:
                return web.json_response({"error": error.detail, "error_type": "overloaded"}, status=503)
            try:
                return await handle(request)
            finally:
                self._waiting.give_back(client, 1)

        return respond

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
        """All requests that wait for the next scrape share it: nothing in it is older than a request."""
        if self._next_scrape is None:
            self._next_scrape = asyncio.create_task(self._scrape_when_due())
        body = await asyncio.shield(self._next_scrape)
        headers = {"Content-Type": CONTENT_TYPE_PLAIN_0_0_4}
        response = web.Response(body=body, headers=headers, zlib_executor_size=_COMPRESSED_IN_THREAD)
        if "gzip" in request.headers.get("Accept-Encoding", ""):
            response.enable_compression(web.ContentCoding.gzip)
        return response

    async def _scrape_when_due(self) -> bytes:
        async with self._scraping:
            await asyncio.sleep(self._scrape_due - time.monotonic())
            self._next_scrape, started, parts = None, time.monotonic(), []
            self._scrape_due = started + MAX_SCRAPE_PAUSE
            for part in self._scrape():
                parts.append(part)
                await asyncio.sleep(0)
            self._scrape_due = min(self._scrape_due, started + (time.monotonic() - started) / MAX_SCRAPE_SHARE)
        return b"".join(parts)

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
