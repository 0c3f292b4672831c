"""How TGI says that a call has failed."""

from tgis.api.http.operations import ErrorFormat, HttpError
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


def _convert(error: RequestError) -> tuple[int, ErrorResponse]:
    if isinstance(error, HttpError):
        status = error.status
        kind, beginning = _HTTP_ENDS.get(status, ("validation", "Input validation error: "))
    else:
        status, kind, beginning = _ENDS[type(error)]
    text = str(error) if isinstance(error, Overloaded) else error.detail  # all of TGI's text is fixed where overloaded
    return status, ErrorResponse(beginning + text, kind)


ERRORS = ErrorFormat(ErrorResponse, _convert)
