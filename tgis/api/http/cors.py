"""CORS: which pages of other origins may call the APIs. None by default."""

from collections.abc import Collection

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler

_ALLOWED = {
    hdrs.ACCESS_CONTROL_ALLOW_METHODS: "GET, POST",
    hdrs.ACCESS_CONTROL_ALLOW_HEADERS: "authorization, content-type, x-correlation-id, x-request-id",
    hdrs.ACCESS_CONTROL_MAX_AGE: "600",
}
_EXPOSED = (
    "x-compute-type, x-compute-time, x-compute-characters, x-total-time, x-validation-time, x-queue-time, "
    "x-inference-time, x-time-per-token, x-prompt-tokens, x-generated-tokens, x-request-id"
)


def allow_origins(application: web.Application, origins: Collection[str]) -> None:
    """Let pages of these origins, of all if there is a `*`, call what the application serves."""
    if not origins:
        return

    @web.middleware
    async def answer_preflight(request: web.Request, handler: Handler) -> web.StreamResponse:
        """A browser asks this before the request itself, and without its token."""
        if request.method == hdrs.METH_OPTIONS and hdrs.ACCESS_CONTROL_REQUEST_METHOD in request.headers:
            return web.Response(headers=_ALLOWED)
        return await handler(request)

    async def name_origin(request: web.Request, response: web.StreamResponse) -> None:
        origin = request.headers.get(hdrs.ORIGIN)
        response.headers.add(hdrs.VARY, hdrs.ORIGIN)
        if origin is not None and ("*" in origins or origin in origins):
            response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = "*" if "*" in origins else origin
            response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = _EXPOSED

    application.middlewares.append(answer_preflight)
    application.on_response_prepare.append(name_origin)
