"""What an HTTP API is made of: operations, with the types of their bodies, and how it tells about errors."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from tgis.errors import (
    RETRY_SECONDS,
    ClientTimeout,
    EngineFailure,
    InvalidRequest,
    OutOfMemory,
    Overloaded,
    RequestError,
    Unavailable,
)
from tgis.frontend.calls import CallKind

if TYPE_CHECKING:
    from tgis.api.http.calls import HttpCall

Handle = Callable[["HttpCall"], Awaitable[web.StreamResponse]]

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
    """How an API tells its clients about errors."""

    api: str  # in metrics and logs
    type: Any  # of the bodies
    convert: Callable[[RequestError], tuple[int, Any]]  # to a status and a body
    last_event: bytes = b""  # of every stream

    def response(self, error: RequestError) -> web.Response:
        """The answer of a call that fails before it has any other."""
        status, body = self.convert(error)
        response = web.Response(status=status, body=msgspec.json.encode(body), content_type="application/json")
        match error:
            case Overloaded():
                response.headers["Retry-After"] = str(RETRY_SECONDS)
            case HttpError(status=401):
                response.headers["WWW-Authenticate"] = "Bearer"
        return response


@dataclass(frozen=True, slots=True)
class Operation:
    """A method of a path; bodies are types that msgspec encodes, None for no body."""

    method: str
    path: str
    handle: Handle
    errors: ErrorFormat
    id: str
    summary: str
    requests: tuple[Any, ...] = ()  # the body is one of these types
    response: Any = None
    event: Any = None  # of the stream that the answer may be
    kind: CallKind | None = CallKind.SINGLE  # what metrics count if its body is refused; None: it generates nothing
