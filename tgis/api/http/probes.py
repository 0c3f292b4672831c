"""The HTTP port: `/health` for probes, `/metrics` for Prometheus, `/debug/batch` for operators, and nothing else.

The first two never wait for the engine. The third asks it, and is off by default.
"""

import asyncio
import functools
import json
import logging
import math
import socket
import time
from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from tgis.api.http.debug_page import render_error, render_html, render_json
from tgis.errors import StartError, Unavailable
from tgis.ipc.snapshot import Snapshot

KEEPALIVE_SECONDS = 5.0  # also limits how long a request may take to arrive
MAX_CONNECTIONS = 256  # one more closes the oldest: a probe gets through whoever holds the others
LINGER_SECONDS = 1.0  # for a client to stop sending an unwanted body
SHUTDOWN_SECONDS = 1.0
SCRAPE_INTERVAL_SECONDS = 0.1  # a scrape takes the event loop about 10 ms
MAX_LINE_BYTES = 4096
BACKLOG = 128  # connections that wait to be accepted
DEBUG_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'",
}

_log = logging.getLogger(__name__)


class ProbeServer:
    """Owns the HTTP server; `unhealthy_reason` is None while healthy, `scrape` returns the metrics as text.

    `snapshot` returns the state of the batch or raises Unavailable, soon; without it there is no /debug/batch.
    """

    def __init__(
        self,
        host: str,
        port: int,
        unhealthy_reason: Callable[[], str | None],
        scrape: Callable[[], bytes],
        snapshot: Callable[[], Awaitable[Snapshot]] | None = None,
    ) -> None:
        self._host = host
        self._port = port
        self._unhealthy_reason = unhealthy_reason
        self._scrape = scrape
        self._scraped_at = -math.inf
        self._next_scrape: asyncio.Task[bytes] | None = None
        application = web.Application()
        application.router.add_get("/health", self._health, allow_head=False)
        application.router.add_get("/metrics", self._metrics, allow_head=False)
        if snapshot is not None:
            application.router.add_get("/debug/batch", functools.partial(_debug_batch, snapshot), allow_head=False)
        _log.addFilter(_is_server_error)
        self._listener: asyncio.Server | None = None
        self._runner = web.AppRunner(
            application,
            access_log=None,
            logger=_log,
            keepalive_timeout=KEEPALIVE_SECONDS,
            lingering_time=LINGER_SECONDS,
            auto_decompress=False,
            max_line_size=MAX_LINE_BYTES,
            max_field_size=MAX_LINE_BYTES,
            shutdown_timeout=SHUTDOWN_SECONDS,
        )

    async def start(self) -> int:
        """Serve, and return the port; StartError if it is taken."""
        await self._runner.setup()
        try:
            family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
            listener = socket.create_server((self._host, self._port), family=family)
            loop = asyncio.get_running_loop()
            # With this backlog, asyncio tries to accept one at a time.
            self._listener = await loop.create_server(self._connection, sock=listener, backlog=1)
            listener.listen(BACKLOG)
        except OSError as error:
            await self._runner.cleanup()
            raise StartError(f"cannot listen for HTTP: {str(error.strerror).lower()}") from error
        port: int = listener.getsockname()[1]
        return port

    async def stop(self) -> None:
        """Close the port and every connection."""
        if self._listener is not None:
            self._listener.close()
        await self._runner.cleanup()

    def _connection(self) -> asyncio.Protocol:
        server = self._runner.server
        assert server is not None
        transports = [connection.transport for connection in server.connections if connection.transport is not None]
        if len(transports) >= MAX_CONNECTIONS:
            transports[0].abort()
        return server()

    async def _health(self, _request: web.Request) -> web.Response:
        reason = self._unhealthy_reason()
        return web.Response() if reason is None else web.json_response({"error": reason}, status=503)

    async def _metrics(self, _request: web.Request) -> web.Response:
        """All requests that wait for the next scrape share it: nothing in it is older than a request."""
        if self._next_scrape is None:
            self._next_scrape = asyncio.create_task(self._scrape_when_due())
        body = await asyncio.shield(self._next_scrape)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

    async def _scrape_when_due(self) -> bytes:
        await asyncio.sleep(self._scraped_at + SCRAPE_INTERVAL_SECONDS - time.monotonic())
        self._scraped_at, self._next_scrape = time.monotonic(), None
        return self._scrape()


async def _debug_batch(snapshot: Callable[[], Awaitable[Snapshot]], request: web.Request) -> web.Response:
    """HTML for browsers, JSON for other clients."""
    page = "text/html" in request.headers.get("Accept", "")
    status, kind = 200, "text/html" if page else "application/json"
    try:
        state = await snapshot()
        text = render_html(state) if page else render_json(state)
    except Unavailable as error:
        status, text = 503, render_error(str(error)) if page else json.dumps({"error": str(error)})
    return web.Response(text=text, status=status, content_type=kind, headers=DEBUG_HEADERS)


def _is_server_error(record: logging.LogRecord) -> bool:
    """Whether to log a record: malformed requests are not our errors, and their bytes must stay out of the log."""
    return record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError)
