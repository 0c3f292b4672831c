"""An HTTP port as it is while the model is loading."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tgis.api.clients import Clients
from tgis.api.http.auth import HttpAuth
from tgis.api.http.calls import HttpApi
from tgis.api.http.pages.routes import Pages
from tgis.api.http.server import HttpServer
from tgis.api.openai.operations import OpenAIApi
from tgis.api.tgi.routes import TgiApi
from tgis.config import Config
from tgis.prompts.catalog import AdapterCatalog


@asynccontextmanager
async def serving_while_loading(api_key: str | None = None) -> AsyncIterator[str]:
    """Its address; every route of the APIs is there."""
    config, auth = Config(model_name="m", bind_address="127.0.0.1"), HttpAuth(None, api_key, lambda: None)
    openai = OpenAIApi(config, AdapterCatalog(None))
    operations = [*TgiApi(config, openai.chat, openai.completions).operations(), *openai.operations()]
    clients = Clients(config)
    api = HttpApi(config, auth, clients)
    routes = [*(api.route(each) for each in operations), *Pages(operations, auth).routes()]
    server = HttpServer(config, 0, routes, clients)
    try:
        yield f"http://127.0.0.1:{await server.start()}"
    finally:
        await server.stop()
