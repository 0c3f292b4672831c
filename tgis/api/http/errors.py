"""How calls fail over HTTP: what only HTTP knows to be wrong, and what a face says to its clients."""

import math
from typing import Any, Protocol

from aiohttp import web

from tgis.errors import Overloaded, RequestError


class HttpError(RequestError):
    """Ends a call with this status, whatever the face."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Face(Protocol):
    """How an API tells its clients about errors."""

    error: Any  # the type of its bodies
    last_event: bytes  # of every stream; b"" for none

    def status(self, error: RequestError) -> int:
        """The status of an answer that is no stream, or of a stream that has not begun."""

    def error_body(self, error: RequestError) -> bytes:
        """JSON: the answer, or an event of a stream that has begun."""


def error_response(error: RequestError, face: Face) -> web.Response:
    """The answer of a call that fails before it has any other."""
    body = face.error_body(error)
    response = web.Response(status=face.status(error), body=body, content_type="application/json")
    match error:
        case Overloaded(retry_after=seconds):
            response.headers["Retry-After"] = str(math.ceil(seconds))
        case HttpError(status=401):
            response.headers["WWW-Authenticate"] = "Bearer"
    return response
