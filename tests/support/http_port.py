"""HTTP ports in the process of a test: with any routes, or with those of a server whose model is loading."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any
from unittest import mock

from aiohttp import web

from tgis.api.http import app
from tgis.api.http.app import HttpServer
from tgis.api.http.auth import HttpAuth
from tgis.api.http.operations import HttpApi, Operation
from tgis.api.http.pages.routes import page_routes
from tgis.api.openai.operations import OpenAIApi
from tgis.api.tgi.routes import TgiApi
from tgis.config import Config
from tgis.frontend.admission import Admission
from tgis.limits import admission
from tgis.prompts.catalog import AdapterCatalog

NO_AUTH = HttpAuth(None, None, lambda: None)


@asynccontextmanager
async def serving(
    routes: Sequence[web.RouteDef], limits: Admission | None = None, **options: Any
) -> AsyncIterator[int]:
    """A port with these routes."""
    config = Config(model_name="m", **{"bind_address": "127.0.0.1", **options})
    server = HttpServer(config, 0, routes, limits or admission(config))
    port = await server.start()
    try:
        yield port
    finally:
        with mock.patch.object(app, "_LAST_REQUESTS_SECONDS", 0):
            await server.stop()


def api_operations(config: Config, template: "asyncio.Future[Any]") -> list[Operation]:
    """Those of all HTTP APIs."""
    openai = OpenAIApi(config, AdapterCatalog(None), {}, template)
    return [*TgiApi(openai).operations(), *openai.operations()]


def api_routes(
    config: Config, operations: Sequence[Operation], generator: "asyncio.Future[Any]"
) -> Iterator[web.RouteDef]:
    return map(HttpApi(config, NO_AUTH, admission(config), lambda *_: None, generator).route, operations)


@asynccontextmanager
async def serving_while_loading(**options: Any) -> AsyncIterator[str]:
    """Its address; every route of the APIs is there."""
    config, pending = Config(model_name="m"), asyncio.Future[Any]()
    operations = api_operations(config, pending)
    pages = page_routes(operations, "m", needs_token=False)
    async with serving([*api_routes(config, operations, pending), *pages], **options) as port:
        yield f"http://127.0.0.1:{port}"


async def no_metrics() -> bytes:
    return b""


async def exchange(port: int, sent: bytes) -> bytes:
    """Everything that the server sends until it closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()
