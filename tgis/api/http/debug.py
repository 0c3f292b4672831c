"""`/debug/batch`: the batch and the queue as JSON, and why the first request waits."""

from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

from tgis.api.http.auth import HttpAuth
from tgis.api.http.errors import http_status
from tgis.api.http.responses import NO_STORE, json_response
from tgis.errors import RequestError
from tgis.ipc.messages import BatchState

InspectBatch = Callable[[], Awaitable[BatchState]]

_REFRESH_SECONDS = 2
_HEADERS = NO_STORE | {"Refresh": str(_REFRESH_SECONDS)}


def debug_route(auth: HttpAuth, inspect_batch: InspectBatch) -> web.RouteDef:
    """The route; `inspect_batch` returns the state of the batch or raises Unavailable, without waiting for long."""

    async def get(request: web.Request) -> web.Response:
        try:
            auth.check(request)
            state = await inspect_batch()
        except RequestError as error:
            return web.json_response({"error": str(error)}, status=http_status(error), headers=_HEADERS)
        return json_response(msgspec.json.format(msgspec.json.encode(state), indent=2) + b"\n", _HEADERS)

    return web.get("/debug/batch", get)
