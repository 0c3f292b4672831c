"""Errors of HTTP calls: their statuses, and the shape in which an API reports them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web

from tgis.errors import (
    ClientTimeout,
    EngineFailure,
    InvalidRequest,
    OutOfMemory,
    Overloaded,
    RequestError,
    Unavailable,
)

_STATUSES: dict[type[RequestError], int] = {
    InvalidRequest: 422,
    OutOfMemory: 424,
    EngineFailure: 424,
    Overloaded: 429,
    ClientTimeout: 408,
    Unavailable: 503,
}


class HttpError(RequestError):
    """Ends a call with this status in every API."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def http_status(error: RequestError) -> int:
    """The status as in TGI."""
    if isinstance(error, HttpError):
        return error.status
    return next(status for kind, status in _STATUSES.items() if isinstance(error, kind))


@dataclass(frozen=True, slots=True)
class ErrorFormat:
    """How an API reports errors.

    `api` is its name in metrics and logs, `type` the type of error bodies, `convert` returns a status and a body.
    Every stream ends with `last_event`.
    """

    api: str
    type: Any
    convert: Callable[[RequestError], tuple[int, Any]]
    last_event: bytes = b""

    def response(self, error: RequestError) -> web.Response:
        """The answer of a call that fails before it has sent anything."""
        status, body = self.convert(error)
        headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
        data = msgspec.json.encode(body)
        return web.Response(status=status, body=data, content_type="application/json", headers=headers)
