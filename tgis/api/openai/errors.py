"""Errors in OpenAI's shape, with TGI's name of the kind of error beside it."""

from tgis.api.http.operations import ErrorFormat, HttpError
from tgis.api.openai.bodies import ErrorBody, ErrorDetail
from tgis.api.openai.params import FIELDS
from tgis.errors import (
    ClientTimeout,
    InvalidRequest,
    Overloaded,
    RequestError,
    TooLong,
    Unavailable,
    Unimplemented,
)

# Status -> the type of OpenAI's error, and TGI's.
_TYPES = {
    400: ("invalid_request_error", "validation"),
    401: ("authentication_error", "authentication"),
    404: ("not_found_error", "not_found"),
    408: ("timeout_error", "timeout"),
    413: ("invalid_request_error", "validation"),
    415: ("invalid_request_error", "validation"),
    429: ("rate_limit_error", "overloaded"),
    503: ("service_unavailable_error", "unavailable"),
}
_CODES = {401: "invalid_api_key", 404: "model_not_found", 429: "rate_limit_exceeded"}
_SERVER_ERROR = ("server_error", "generation")
_UNPROCESSABLE = 422


def _convert(error: RequestError) -> tuple[int, ErrorBody]:
    status = _status(error)
    kind, tgi_kind = _TYPES.get(status, _SERVER_ERROR)
    message, param, code = error.detail, None, _CODES.get(status)
    if isinstance(error, InvalidRequest):
        param = FIELDS.get(error.field, error.field) or None
        for name, field in FIELDS.items():
            message = message.replace(name, field)
    if isinstance(error, TooLong):
        code = "context_length_exceeded"  # at which agents shorten their history
    return status, ErrorBody(ErrorDetail(message, kind, param, code, status), tgi_kind)


def _status(error: RequestError) -> int:
    match error:
        case HttpError(status=status):
            return 400 if status == _UNPROCESSABLE else status  # OpenAI has one status for both
        case InvalidRequest() | Unimplemented():
            return 400
        case ClientTimeout():
            return 408
        case Overloaded():
            return 429
        case Unavailable():
            return 503
    return 500


ERRORS = ErrorFormat(ErrorBody, _convert, b"[DONE]")
