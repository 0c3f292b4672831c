"""Headers: what an answer has taken, as in TGI, which pages of other origins may read it (CORS), and for which host."""

import ipaddress
import re
import time
from collections.abc import Collection, Sequence

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler

from tgis.config import Config
from tgis.frontend.output import RequestOutput

_PREFLIGHT = {
    hdrs.ACCESS_CONTROL_ALLOW_METHODS: "GET, POST",
    hdrs.ACCESS_CONTROL_ALLOW_HEADERS: "authorization, content-type, x-correlation-id, x-request-id",
    hdrs.ACCESS_CONTROL_MAX_AGE: "600",
}
_EXPOSED = (
    "x-compute-type, x-compute-time, x-compute-characters, x-total-time, x-validation-time, x-queue-time, "
    "x-inference-time, x-time-per-token, x-prompt-tokens, x-generated-tokens, x-request-id"
)


def timing_headers(outputs: Sequence[RequestOutput], num_input_tokens: int) -> dict[str, str]:
    """Sums over whole outputs of a call, from its arrival to now, in milliseconds; x-compute-time is in seconds."""
    now = time.monotonic()
    seconds = dict.fromkeys(("total", "validation", "queue", "inference"), 0.0)
    per_token = 0.0
    for output in outputs:
        times = output.timings
        assert times is not None
        scheduled = times.scheduled or now
        seconds["total"] += now - times.arrived
        seconds["validation"] += times.submitted - times.arrived
        seconds["queue"] += scheduled - times.submitted
        seconds["inference"] += now - scheduled
        per_token += (now - scheduled) / max(output.generated_token_count, 1)
    return {
        "x-compute-time": f"{seconds['total'] / len(outputs):.9f}",  # of the call, not the sum
        **{f"x-{name}-time": _milliseconds(value) for name, value in seconds.items()},
        "x-time-per-token": _milliseconds(per_token),
        "x-prompt-tokens": str(num_input_tokens),
        "x-generated-tokens": str(sum(output.generated_token_count for output in outputs)),
    }


def _milliseconds(seconds: float) -> str:
    return str(int(seconds * 1000))


def allow_origins(application: web.Application, origins: Collection[str]) -> None:
    """Let pages of these origins, of all if there is a `*`, call what the application serves."""

    @web.middleware
    async def answer_preflight(request: web.Request, handler: Handler) -> web.StreamResponse:
        """A browser asks this before the request itself, and without its token."""
        if request.method == hdrs.METH_OPTIONS and hdrs.ACCESS_CONTROL_REQUEST_METHOD in request.headers:
            return web.Response(headers=_PREFLIGHT)
        return await handler(request)

    async def name_origin(request: web.Request, response: web.StreamResponse) -> None:
        origin = request.headers.get(hdrs.ORIGIN)
        response.headers.add(hdrs.VARY, hdrs.ORIGIN)
        if origin is not None and ("*" in origins or origin in origins):
            response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = "*" if "*" in origins else origin
            response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = _EXPOSED

    if origins:
        application.middlewares.append(answer_preflight)
        application.on_response_prepare.append(name_origin)


def check_hosts(application: web.Application, config: Config) -> None:
    """Refuse other hosts than ALLOWED_HOSTS, where it is set, or where this machine needs no token.

    A web page can make the name that it comes from mean a loopback address (DNS rebinding), but not another name.
    """
    needs_token = config.auth_token_path is not None or config.api_key is not None
    is_open = ipaddress.ip_address(config.bind_address).is_loopback and not needs_token
    hosts = {"localhost", *map(str.lower, config.allowed_hosts)}

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not _is_among(hosts, request.headers.get(hdrs.HOST, "localhost")):
            raise web.HTTPForbidden(text="403: Host must be localhost, an address or one of ALLOWED_HOSTS")
        return await handler(request)

    if (config.allowed_hosts or is_open) and "*" not in hosts:
        application.middlewares.append(check)


def _is_among(hosts: Collection[str], host: str) -> bool:
    name = re.sub(r":\d*$", "", host).lower()
    try:
        return name in hosts or bool(ipaddress.ip_address(name.strip("[]")))
    except ValueError:
        return False
