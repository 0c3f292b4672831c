"""An HTTP port: aiohttp's runner around the routes that it is given, with limits, TLS and one middleware."""

import asyncio
import logging
import math
import socket
from collections.abc import Iterator, Sequence
from typing import Any, cast

from aiohttp import hdrs, web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler

from tgis.api.http.cors import HostCheck, allow_origin, preflight_response
from tgis.api.http.operations import REQUEST_ID
from tgis.api.http.probes import Probes
from tgis.api.listen import listen
from tgis.config import Config
from tgis.errors import RETRY_SECONDS
from tgis.frontend.admission import Admission
from tgis.security.tls import Certificates

MAX_CONNECTIONS = 4096
MAX_HEAD_BYTES = 1 << 15
# A client may take this long to stop sending an unwanted body.
LINGER_SECONDS = 1.0
TLS_HANDSHAKE_SECONDS = 5.0
# Answers that have begun may take this long to be written.
SHUTDOWN_SECONDS = 1.0
# Connections accepted just before the port closed may send their requests in this time.
_LAST_REQUESTS_SECONDS = 0.1

log = logging.getLogger(__name__)


class Connection(web.RequestHandler):
    """A connection of a port with at most MAX_CONNECTIONS.

    It is aborted if its client stops reading, or sends no first head, for `client_seconds`; between requests it may be
    idle for `idle_seconds`.
    """

    __slots__ = ("_client_seconds", "_head_timer", "_read_timer", "_server")

    def __init__(self, server: web.Server, client_seconds: float, idle_seconds: float) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            logger=log,
            access_log=None,  # type: ignore[arg-type]
            keepalive_timeout=idle_seconds,
            lingering_time=LINGER_SECONDS,
            auto_decompress=False,
        )
        self._server, self._client_seconds = server, client_seconds

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        abort = cast("asyncio.Transport", transport).abort
        self._head_timer = asyncio.get_running_loop().call_later(self._client_seconds, abort)
        if len(self._server.connections) > MAX_CONNECTIONS:
            abort()

    def head_arrived(self) -> None:
        self._head_timer.cancel()

    def pause_writing(self) -> None:
        super().pause_writing()
        assert self.transport is not None
        self._read_timer = asyncio.get_running_loop().call_later(self._client_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        self._read_timer.cancel()
        super().resume_writing()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """aiohttp's answer, but for a malformed request one that does not quote it."""
        if status != 400:
            return super().handle_error(request, status, exc, message)
        return web.json_response({"error": "malformed HTTP request", "error_type": "bad_request"}, status=400)


class HttpServer:
    """Owns one port; create it inside the event loop."""

    def __init__(
        self,
        config: Config,
        port: int,
        routes: Sequence[web.RouteDef],
        admission: Admission,
        certificates: Certificates | None = None,
    ) -> None:
        self._config, self._port = config, port
        self._admission = admission
        self._certificates = certificates
        self._hosts = HostCheck(config)
        application = web.Application(middlewares=[self._answer], client_max_size=config.payload_limit)
        application.on_response_prepare.append(self._add_headers)
        application.add_routes(_with_other_paths(routes))
        self._runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=SHUTDOWN_SECONDS)
        self._listener: asyncio.Server | None = None

    async def start(self) -> int:
        """Serve, and return the port; StartError if it is taken."""
        listener = self._bind()
        await self._runner.setup()
        server = self._runner.server
        assert server is not None
        context = self._certificates.server_context() if self._certificates else None
        self._listener = await asyncio.get_running_loop().create_server(
            lambda: Connection(server, self._config.client_timeout_seconds, self._config.http_keep_alive_seconds),
            sock=listener,
            ssl=context,
            ssl_handshake_timeout=TLS_HANDSHAKE_SECONDS if context else None,
        )
        port: int = listener.getsockname()[1]
        return port

    def _bind(self) -> socket.socket:
        listener = listen("HTTP", self._config.bind_address, self._port)
        # Accepted connections inherit it: the system ends those whose clients do not read, also while they close.
        milliseconds = math.ceil(self._config.client_timeout_seconds * 1000)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        return listener

    async def stop(self) -> None:
        """Close the port and every connection; answers that have begun are written first."""
        if self._listener is not None:
            self._listener.close()
            await asyncio.sleep(_LAST_REQUESTS_SECONDS)
        await self._runner.cleanup()

    @web.middleware
    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check head and host and answer preflights, before the handler; errors of aiohttp become JSON."""
        cast("Connection", request.protocol).head_arrived()
        try:
            if sum(len(name) + len(value) for name, value in request.raw_headers) > MAX_HEAD_BYTES:
                raise web.HTTPRequestHeaderFieldsTooLarge
            if not self._hosts.allows(request):
                raise web.HTTPForbidden(text="403: Host must be localhost, an address or one of ALLOWED_HOSTS")
            if self._config.cors_allow_origin and (response := preflight_response(request)):
                return response
            return await handler(request)
        except web.HTTPException as error:
            return _json_error(request, error)

    async def _add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        if request_id := request.get(REQUEST_ID):
            response.headers["x-request-id"] = request_id
        if response.status in (429, 503):
            response.headers.setdefault("Retry-After", str(RETRY_SECONDS))
        if self._config.cors_allow_origin:
            allow_origin(request, response, self._config.cors_allow_origin)
        if self._admission.draining or not request.content.is_eof():
            response.force_close()
            response.headers[hdrs.CONNECTION] = "close"


class HttpPorts:
    """PORT, with probes and metrics in the clear, and the port of the APIs; create it inside the event loop.

    The APIs are on HTTP_API_PORT with the gRPC port's TLS, else on PORT unless the gRPC port has TLS.
    """

    def __init__(
        self,
        config: Config,
        probes: Probes,
        api_routes: Sequence[web.RouteDef],
        admission: Admission,
        certificates: Certificates | None,
    ) -> None:
        api_port = config.http_api_port
        if api_routes and certificates is not None and api_port is None:
            log.warning("the HTTP APIs and /debug/batch are off: with TLS they need HTTP_API_PORT")
            api_routes = []
        shared_routes = api_routes if api_port is None else []
        self._servers = [HttpServer(config, config.port, [*probes.routes(), *shared_routes], admission)]
        if api_routes and api_port is not None:
            api_routes = [*probes.health_routes(), *api_routes]
            self._servers.append(HttpServer(config, api_port, api_routes, admission, certificates))
        self._has_api = config.http_api and bool(api_routes)

    async def start(self) -> tuple[int, int | None]:
        """Serve, and return the ports of probes and of the APIs; StartError if one is taken."""
        ports = [await server.start() for server in self._servers]
        return ports[0], ports[-1] if self._has_api else None

    async def stop(self) -> None:
        """Close the ports and every connection."""
        for server in self._servers:
            await server.stop()


def _with_other_paths(routes: Sequence[web.RouteDef]) -> Iterator[web.RouteDef]:
    """The routes, also without /v1, which clients forget, and with a slash at the end."""
    for route in routes:
        short = route.path.removeprefix("/v1")
        for path in dict.fromkeys((route.path, short, f"{route.path}/", f"{short}/")):
            if path != "//":
                yield web.RouteDef(route.method, path, route.handler, route.kwargs)


def _json_error(request: web.Request, error: web.HTTPException) -> web.Response:
    error.headers.pop(hdrs.CONTENT_TYPE, None)
    kind, text = error.reason.lower().replace(" ", "_"), f"{error.text}: {request.method} {request.path:.100}"
    if error.status == 404:
        text = f"no {request.path:.100}: this server generates text"
    body: dict[str, Any] = {"error": text, "error_type": kind}
    if request.path.startswith("/v1/"):  # OpenAI clients show the message of an error object
        body["error"] = {"message": text, "type": "invalid_request_error", "param": None, "code": kind}
    return web.json_response(body, status=error.status, headers=error.headers)


def _is_server_error(record: logging.LogRecord) -> bool:
    """False for malformed requests, whose bytes must stay out of the log, and for clients that vanish."""
    error = record.exc_info and record.exc_info[1]
    return not isinstance(error, HttpProcessingError | web.RequestPayloadError | ConnectionError)


log.addFilter(_is_server_error)
