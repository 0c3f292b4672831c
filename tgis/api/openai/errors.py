"""Errors in OpenAI's shape, with TGI's name of the kind of error beside it."""

from tgis.api.http.errors import ErrorFormat, http_status
from tgis.api.openai.bodies import ErrorBody, ErrorDetail
from tgis.api.openai.params import FIELDS
from tgis.errors import InvalidRequest, RequestError, TooLong

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
_STATUSES = {422: 400, 424: 500}  # of TGI, which OpenAI does not have


def _convert(error: RequestError) -> tuple[int, ErrorBody]:
    status = http_status(error)
    status = _STATUSES.get(status, status)
    kind, tgi_kind = _TYPES.get(status, _SERVER_ERROR)
    message, param, code = error.detail, None, _CODES.get(status)
    if isinstance(error, InvalidRequest):
        param = FIELDS.get(error.field, error.field) or None
        for name, field in FIELDS.items():
            message = message.replace(name, field)
    if isinstance(error, TooLong):
        code = "context_length_exceeded"  # at this, or words of the message, agents shorten a history
        message = f"This model's maximum context length is {error.max_length} tokens, the prompt is too long: {message}"
    return status, ErrorBody(ErrorDetail(message, kind, param, code, status), tgi_kind)


ERRORS = ErrorFormat("openai", ErrorBody, _convert, b"[DONE]")
