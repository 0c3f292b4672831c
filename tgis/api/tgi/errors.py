"""Errors in the format of TGI."""

from tgis.api.http.errors import ErrorFormat, http_status
from tgis.api.openai.template_process import TemplateError
from tgis.api.tgi.schema import ErrorResponse
from tgis.errors import OutOfMemory, Overloaded, RequestError

_VALIDATION = ("validation", "Input validation error: ")
# Status -> error_type and prefix of the text.
_ENDS = {
    401: ("unauthorized", ""),
    408: ("validation", ""),
    424: ("generation", ""),
    429: ("overloaded", ""),
    500: ("incomplete_generation", "Incomplete generation: "),
    503: ("unavailable", ""),
}


def _convert(error: RequestError) -> tuple[int, ErrorResponse]:
    status = http_status(error)
    match error:
        case TemplateError():
            kind, beginning = "template_error", "Template error: "
        case OutOfMemory():
            kind, beginning = "generation", "Request failed during generation: "
        case _:
            kind, beginning = _ENDS.get(status, _VALIDATION)
    text = str(error) if isinstance(error, Overloaded) else error.detail  # TGI's text has no reason
    return status, ErrorResponse(beginning + text, kind)


ERRORS = ErrorFormat("tgi", ErrorResponse, _convert)
