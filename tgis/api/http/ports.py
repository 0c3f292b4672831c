"""Which HTTP port serves what: probes and metrics in the clear, the APIs beside them or on a port of their own."""

import logging
from dataclasses import dataclass

from aiohttp import web

from tgis.api.clients import Clients
from tgis.api.http.probes import Probes
from tgis.api.http.server import HttpServer
from tgis.config import Config
from tgis.security.tls import Certificates

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PortNumbers:
    """Those that are open."""

    grpc: int
    probes: int  # and metrics
    http_api: int | None


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
        is_on = config.http_api and (certificates is None or config.http_api_port is not None)
        if config.http_api and not is_on:
            log.warning("the HTTP APIs are off: with TLS they need HTTP_API_PORT")
        api_routes = [probes.root_route(), *api_routes]
        self._api: HttpServer | None = None
        if is_on and config.metrics_port is None and config.http_api_port is None:
            self._probes = self._api = HttpServer(config, probe_port, [*probes.routes(), *api_routes], clients)
            return
        self._probes = HttpServer(config, probe_port, probes.routes(), clients)
        if is_on:
            api_port = config.port if config.http_api_port is None else config.http_api_port
            self._api = HttpServer(config, api_port, [*probes.health_routes(), *api_routes], clients, certificates)

    async def start(self) -> tuple[int, int | None]:
        """Serve, and return the ports of probes and of the APIs; StartError if one is taken."""
        probe_port = await self._probes.start()
        if self._api is self._probes:
            return probe_port, probe_port
        return probe_port, await self._api.start() if self._api else None

    async def stop(self) -> None:
        """Close the ports and every connection."""
        await self._probes.stop()
        if self._api is not None and self._api is not self._probes:
            await self._api.stop()
