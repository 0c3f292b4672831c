"""An HTTP port: limits and TLS around the routes that it is given."""

import asyncio
import logging
import socket
from collections.abc import Sequence
from typing import Any

from aiohttp import hdrs, web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler

from tgis.api.clients import Clients
from tgis.api.http import connections
from tgis.api.http.connections import Connection, Connections
from tgis.api.http.headers import allow_origins, check_hosts
from tgis.config import Config
from tgis.errors import RETRY_SECONDS, StartError
from tgis.security.tls import Certificates

HANDSHAKE_SECONDS = 5.0  # of TLS
SHUTDOWN_SECONDS = 1.0
_LAST_ANSWERS_SECONDS = 0.1  # for requests of connections that were accepted just before the end
BACKLOG = 128  # connections that wait to be accepted


class HttpServer:
    """Owns one port; create it inside the event loop."""

    def __init__(
        self,
        config: Config,
        port: int,
        routes: Sequence[web.RouteDef],
        clients: Clients,
        certificates: Certificates | None = None,
    ) -> None:
        self._host, self._port = config.bind_address, port
        self._certificates = certificates
        self._connections = Connections(config, clients)
        application = web.Application(middlewares=[_answer], client_max_size=config.payload_limit)
        application.add_routes(routes)
        application.add_routes(
            web.route(route.method, f"{route.path}/", route.handler, **route.kwargs)
            for route in routes
            if not route.path.endswith("/")
        )
        check_hosts(application, config)
        allow_origins(application, config.cors_allow_origin)
        connections.log.addFilter(_is_server_error)
        self._runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=SHUTDOWN_SECONDS)
        self._listener: asyncio.Server | None = None

    async def start(self) -> int:
        """Serve, and return the port; StartError if it is taken."""
        await self._runner.setup()
        try:
            family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
            listener = socket.create_server((self._host, self._port), family=family)
            await self._listen(listener)
        except OSError as error:
            await self._runner.cleanup()
            reason = str(error.strerror).partition(" (")[0]  # asyncio repeats the address there
            raise StartError(f"cannot listen for HTTP on {self._host}:{self._port}: {reason}") from error
        port: int = listener.getsockname()[1]
        return port

    async def _listen(self, listener: socket.socket) -> None:
        server = self._runner.server
        assert server is not None
        context = self._certificates.server_context() if self._certificates else None
        self._listener = await asyncio.get_running_loop().create_server(
            lambda: Connection(server, self._connections),
            sock=listener,
            backlog=1,  # with BACKLOG, asyncio would try to accept as many at a time
            ssl=context,
            ssl_handshake_timeout=HANDSHAKE_SECONDS if context else None,
            ssl_shutdown_timeout=SHUTDOWN_SECONDS if context else None,
        )
        listener.listen(BACKLOG)

    async def stop(self) -> None:
        """Close the port and every connection."""
        if self._listener is not None:
            self._listener.close()
            await asyncio.sleep(_LAST_ANSWERS_SECONDS)
        await self._runner.cleanup()


@web.middleware
async def _answer(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Say while the request is answered, and what every answer says."""
    connection = Connection.of(request)
    async with connection.answering():
        response = await _respond(request, handler)
    if response.status == 503 and not response.prepared:
        response.headers.setdefault("Retry-After", str(RETRY_SECONDS))
    if connection.clients.draining or request.content.exception() is not None:
        response.force_close()
    return response


async def _respond(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse too large a head; errors of aiohttp's own become JSON."""
    try:
        if sum(len(name) + len(value) for name, value in request.raw_headers) > connections.MAX_HEAD_BYTES:
            raise web.HTTPRequestHeaderFieldsTooLarge
        return await handler(request)
    except web.HTTPException as error:
        error.__traceback__ = None  # which knows the request, which knows the error
        error.headers.pop(hdrs.CONTENT_TYPE, None)
        kind = error.reason.lower().replace(" ", "_")
        body: dict[str, Any] = {"error": error.text, "error_type": kind}
        if request.path.startswith("/v1/"):  # OpenAI's clients show the message of an object
            message = f"{error.text}: {request.method} {request.path:.100}"
            body["error"] = {"message": message, "type": "invalid_request_error", "param": None, "code": kind}
        return web.json_response(body, status=error.status, headers=error.headers)


def _is_server_error(record: logging.LogRecord) -> bool:
    """False for malformed requests, whose bytes must stay out of the log, and for clients that vanish."""
    return record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError | ConnectionError)
