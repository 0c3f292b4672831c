"""How TGI says that a call has failed."""

import msgspec

from tgis.api.http.errors import HttpError
from tgis.api.tgi.schema import ErrorResponse
from tgis.errors import (
    ClientTimeout,
    EngineFailure,
    InvalidRequest,
    OutOfMemory,
    Overloaded,
    QueueFull,
    RequestError,
    TooLong,
    Unavailable,
    Unimplemented,
)
from tgis.frontend.chat_template import TemplateError

# Status, error_type, and what the text begins with.
_ENDS: dict[type[RequestError], tuple[int, str, str]] = {
    InvalidRequest: (422, "validation", "Input validation error: "),
    TooLong: (422, "validation", "Input validation error: "),
    TemplateError: (422, "template_error", "Template error: "),
    Unimplemented: (422, "validation", "Input validation error: "),
    Overloaded: (429, "overloaded", ""),
    QueueFull: (429, "overloaded", ""),
    OutOfMemory: (424, "generation", "Request failed during generation: "),
    EngineFailure: (424, "generation", ""),
    ClientTimeout: (408, "validation", ""),
    Unavailable: (503, "unavailable", ""),
}
_HTTP_ENDS = {401: ("unauthorized", ""), 500: ("incomplete_generation", "Incomplete generation: ")}  # of HttpErrors


class TgiFace:
    """Errors are flat JSON, in streams too."""

    error = ErrorResponse
    last_event = b""

    def status(self, error: RequestError) -> int:
        return _end(error)[0]

    def error_body(self, error: RequestError) -> bytes:
        _, kind, beginning = _end(error)
        return msgspec.json.encode(ErrorResponse(beginning + _text(error), kind))


def _end(error: RequestError) -> tuple[int, str, str]:
    if isinstance(error, HttpError):
        return error.status, *_HTTP_ENDS.get(error.status, ("validation", "Input validation error: "))
    return _ENDS[type(error)]


def _text(error: RequestError) -> str:
    """The detail, but where all of TGI's text is fixed."""
    return str(error) if isinstance(error, Overloaded) else error.detail
