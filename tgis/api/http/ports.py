"""Which HTTP port serves what: probes and metrics in the clear, the APIs beside them or on a port of their own."""

import logging

from aiohttp import web

from tgis.api.http.app import HttpServer
from tgis.api.http.probes import Probes
from tgis.config import Config
from tgis.frontend.admission import Admission
from tgis.security.tls import Certificates

log = logging.getLogger(__name__)


class HttpPorts:
    """All HTTP ports; create it inside the event loop.

    Probes and metrics are on PORT. The APIs are on HTTP_API_PORT, with the gRPC port's TLS, else on PORT, but there
    only where nothing has TLS. /debug/batch, which takes a token, too, is on PORT, with TLS beside the APIs.
    """

    def __init__(
        self,
        config: Config,
        probes: Probes,
        api_routes: list[web.RouteDef],
        admission: Admission,
        certificates: Certificates | None,
    ) -> None:
        api_port = config.http_api_port
        self._has_api = config.http_api and (certificates is None or api_port is not None)
        if config.http_api and not self._has_api:
            log.warning("the HTTP APIs are off: with TLS they need HTTP_API_PORT")
        beside = api_routes if self._has_api and api_port is None else []
        debug, secured = (probes.debug_routes(), []) if certificates is None else ([], probes.debug_routes())
        if secured and not self._has_api:
            log.warning("/debug/batch is off: with TLS it is on HTTP_API_PORT, beside the HTTP APIs")
        self._servers = [HttpServer(config, config.port, [*probes.routes(), *debug, *beside], admission)]
        if self._has_api and api_port is not None:
            api_routes = [*probes.health_routes(), *secured, *api_routes]
            self._servers.append(HttpServer(config, api_port, api_routes, admission, certificates))

    async def start(self) -> tuple[int, int | None]:
        """Serve, and return the ports of probes and of the APIs; StartError if one is taken."""
        ports = [await server.start() for server in self._servers]
        return ports[0], ports[-1] if self._has_api else None

    async def stop(self) -> None:
        """Close the ports and every connection."""
        for server in self._servers:
            await server.stop()
