"""The ports of a server and the APIs on them. They open before the engine is ready, and refuse calls until then."""

import asyncio
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web

from tgis.api.grpc.calls import GrpcCalls
from tgis.api.grpc.server import GrpcServer
from tgis.api.grpc.servicer import GENERATION_SERVICE, GenerationServicer
from tgis.api.http.app import HttpPorts
from tgis.api.http.auth import HttpAuth
from tgis.api.http.debug import InspectBatch, debug_route
from tgis.api.http.operations import HttpApi
from tgis.api.http.pages.routes import page_routes
from tgis.api.http.probes import Probes
from tgis.api.openai.chat_template import ChatTemplate
from tgis.api.openai.operations import OpenAIApi
from tgis.api.openai.replay import REPLAY
from tgis.api.tgi.routes import TgiApi
from tgis.frontend.admission import Admission
from tgis.frontend.generation import Generator
from tgis.frontend.metrics import ServiceMetrics
from tgis.prepare import Preparation
from tgis.prompts.catalog import AdapterCatalog


@dataclass(frozen=True, slots=True)
class Apis:
    """What all APIs of a server share."""

    preparation: Preparation
    admission: Admission
    metrics: ServiceMetrics
    generator: asyncio.Future[Generator]
    chat_template: asyncio.Future[ChatTemplate | None]  # done before the generator is

    def grpc_server(self, unhealthy_reason: Callable[[], str | None]) -> GrpcServer:
        """Create it inside the event loop. Routers' protocol is on it if its stubs are installed."""
        config, tokens, metrics = self.preparation.config, self.preparation.tokens, self.metrics
        calls = GrpcCalls(config, self.admission, tokens, metrics.authentication_failure.inc, metrics.call_ended)
        handlers = [GenerationServicer(calls, config, self.generator).handler()]
        services = [GENERATION_SERVICE]
        if importlib.util.find_spec("smg_grpc_proto"):
            from tgis.api.grpc.vllm_engine import VLLM_ENGINE, VllmEngine  # noqa: PLC0415 - see above

            model, directory = self.preparation.model, self.preparation.template_path
            handlers.append(VllmEngine(calls, config, model, directory, self.generator, unhealthy_reason).handler())
            services.append(VLLM_ENGINE)
        return GrpcServer(handlers, config, calls, self.preparation.certificates, services)

    def http_ports(self, probes: Probes, inspect_batch: InspectBatch) -> HttpPorts:
        """Probes, the REST APIs and their pages, and /debug/batch."""
        config, auth = self.preparation.config, self._http_auth()
        routes = [debug_route(auth, inspect_batch)] if config.debug_batch else []
        if config.http_api:
            routes += self._api_routes(auth)
        return HttpPorts(config, probes, routes, self.admission, self.preparation.certificates)

    def _http_auth(self) -> HttpAuth:
        api_key = self.preparation.config.api_key
        rejected = self.metrics.authentication_failure.inc
        return HttpAuth(self.preparation.tokens, api_key.text if api_key else None, rejected)

    def _api_routes(self, auth: HttpAuth) -> list[web.RouteDef]:
        config = self.preparation.config
        api = HttpApi(config, auth, self.admission, self.metrics.call_ended, self.generator)
        catalog = AdapterCatalog(self.preparation.adapter_store)
        openai = OpenAIApi(config, catalog, self.preparation.model.generation_config, self.chat_template)
        operations = [*TgiApi(openai).operations(), *openai.operations(), REPLAY]
        pages = page_routes(operations, config.shown_model, needs_token=auth.needed)
        return [*map(api.route, operations), *pages]
