"""The HTTP port: `/health` for probes, `/metrics` for Prometheus, `/debug/batch` for a person, and nothing else.

The first two answer from memory: neither waits for the engine or for a queue. The third is there on demand only.
"""

import functools
import json
import logging
from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from tgis.api.http.debug_page import render_error, render_html, render_json
from tgis.errors import StartError, Unavailable
from tgis.ipc.snapshot import Snapshot

KEEPALIVE_SECONDS = 75.0  # for a request to come in whole, too
LINGER_SECONDS = 1.0  # for a client to stop sending a body that nobody wants
SHUTDOWN_SECONDS = 1.0
MAX_LINE_BYTES = 4096
DEBUG_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'",
}

_log = logging.getLogger(__name__)


class ProbeServer:
    """Owns the HTTP server; `healthy` returns what is wrong or None, `scrape` the metrics as text.

    `inspect` tells what the batch is or raises Unavailable, soon; without it there is no view of the batch.
    """

    def __init__(
        self,
        host: str,
        port: int,
        unhealthy_reason: Callable[[], str | None],
        scrape: Callable[[], bytes],
        inspect: Callable[[], Awaitable[Snapshot]] | None = None,
    ) -> None:
        self._host = host
        self._port = port
        self._unhealthy_reason = unhealthy_reason
        self._scrape = scrape
        application = web.Application()
        application.router.add_get("/health", self._health, allow_head=False)
        application.router.add_get("/metrics", self._metrics, allow_head=False)
        if inspect is not None:
            application.router.add_get("/debug/batch", functools.partial(_debug_batch, inspect), allow_head=False)
        _log.addFilter(_is_server_error)
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
        """Begins to answer and returns the port; raises StartError for a taken one."""
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self._host, self._port).start()
        except OSError as error:
            await self._runner.cleanup()
            raise StartError(f"cannot listen for HTTP: {error.strerror}") from error
        port: int = self._runner.addresses[0][1]
        return port

    async def stop(self) -> None:
        """Closes the port and every connection."""
        await self._runner.cleanup()

    async def _health(self, _request: web.Request) -> web.Response:
        reason = self._unhealthy_reason()
        return web.Response() if reason is None else web.json_response({"error": reason}, status=503)

    async def _metrics(self, _request: web.Request) -> web.Response:
        return web.Response(body=self._scrape(), headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})


async def _debug_batch(inspect: Callable[[], Awaitable[Snapshot]], request: web.Request) -> web.Response:
    """A page for browsers, JSON for everybody else."""
    page = "text/html" in request.headers.get("Accept", "")
    status, kind = 200, "text/html" if page else "application/json"
    try:
        snapshot = await inspect()
        text = render_html(snapshot) if page else render_json(snapshot)
    except Unavailable as error:
        status, text = 503, render_error(str(error)) if page else json.dumps({"error": str(error)})
    return web.Response(text=text, status=status, content_type=kind, headers=DEBUG_HEADERS)


def _is_server_error(record: logging.LogRecord) -> bool:
    """Whether an error is worth a line: garbage from clients is not, and its bytes stay out of the log."""
    return record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError)
