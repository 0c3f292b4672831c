"""Which web pages may use a port: pages of other origins (CORS), and pages that reach it under another host name."""

import ipaddress
import re
from collections.abc import Collection

from aiohttp import hdrs, web

from tgis.config import Config

_PREFLIGHT = {
    hdrs.ACCESS_CONTROL_ALLOW_METHODS: "GET, POST",
    hdrs.ACCESS_CONTROL_MAX_AGE: "600",
}


def preflight_response(request: web.Request) -> web.Response | None:
    """The answer to what a browser asks before the request itself, and without its token.

    Every requested header is allowed: client packages send many, and origins are what is restricted.
    """
    is_preflight = request.method == hdrs.METH_OPTIONS and hdrs.ACCESS_CONTROL_REQUEST_METHOD in request.headers
    wanted = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS, "")
    headers = _PREFLIGHT | {hdrs.ACCESS_CONTROL_ALLOW_HEADERS: wanted if wanted.isascii() else ""}
    return web.Response(headers=headers) if is_preflight else None


def allow_origin(request: web.Request, response: web.StreamResponse, origins: Collection[str]) -> None:
    """Let pages of these origins, of all if there is a `*`, read the response."""
    origin = request.headers.get(hdrs.ORIGIN)
    response.headers.add(hdrs.VARY, hdrs.ORIGIN)
    if origin is not None and ("*" in origins or origin in origins):
        response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = "*" if "*" in origins else origin
        response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = "*"


class HostCheck:
    """Refuses other hosts than ALLOWED_HOSTS, where it is set, or where this machine needs no token.

    A web page can make the name that it comes from mean a loopback address (DNS rebinding), but not another name.
    """

    def __init__(self, config: Config) -> None:
        needs_token = config.auth_token_path is not None or config.api_key is not None
        is_open = ipaddress.ip_address(config.bind_address).is_loopback and not needs_token
        self._hosts = {"localhost", *map(str.lower, config.allowed_hosts)}
        self._is_on = bool(config.allowed_hosts or is_open) and "*" not in self._hosts

    def allows(self, request: web.Request) -> bool:
        """Return true if the request names an allowed host, an address or none."""
        name = re.sub(r":\d*$", "", request.headers.get(hdrs.HOST, "localhost")).lower()
        return not self._is_on or name in self._hosts or _is_address(name.strip("[]"))


def _is_address(name: str) -> bool:
    try:
        return bool(ipaddress.ip_address(name))
    except ValueError:
        return False
