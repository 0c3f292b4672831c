"""Which HTTP port serves what: probes and metrics in the clear, the APIs beside them or on a port of their own."""

import logging

from aiohttp import web

from tgis.api.clients import Clients
from tgis.api.http.probes import Probes
from tgis.api.http.server import HttpServer
from tgis.config import Config
from tgis.security.tls import Certificates

log = logging.getLogger(__name__)


class HttpPorts:
    """All HTTP ports; create it inside the event loop.

    Probes and metrics are on METRICS_PORT, else on PORT. The APIs are on HTTP_API_PORT, with the gRPC port's TLS, else
    on PORT, but there only where nothing has TLS.
    """

    def __init__(
        self,
        config: Config,
        probes: Probes,
        api_routes: list[web.RouteDef],
        clients: Clients,
        certificates: Certificates | None,
    ) -> None:
        probe_port = config.port if config.metrics_port is None else config.metrics_port
        api_port = config.port if config.http_api_port is None else config.http_api_port
        self._has_api = config.http_api and (certificates is None or config.http_api_port is not None)
        if config.http_api and not self._has_api:
            log.warning("the HTTP APIs are off: with TLS they need HTTP_API_PORT")
        if self._has_api and config.metrics_port is None and config.http_api_port is None:
            self._servers = [HttpServer(config, probe_port, [*probes.routes(), *api_routes], clients)]
            return
        self._servers = [HttpServer(config, probe_port, probes.routes(), clients)]
        if self._has_api:
            api_routes = [*probes.health_routes(), *api_routes]
            self._servers.append(HttpServer(config, api_port, api_routes, clients, certificates))

    async def start(self) -> tuple[int, int | None]:
        """Serve, and return the ports of probes and of the APIs; StartError if one is taken."""
        ports = [await server.start() for server in self._servers]
        return ports[0], ports[-1] if self._has_api else None

    async def stop(self) -> None:
        """Close the ports and every connection."""
        for server in self._servers:
            await server.stop()
