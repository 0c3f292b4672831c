"""Errors in OpenAI's shape, with TGI's name of the kind of error alongside."""

import functools

from tgis.api.http.errors import ErrorFormat, http_status
from tgis.api.openai.bodies import ErrorBody, ErrorDetail
from tgis.api.openai.params import FIELDS
from tgis.errors import InvalidRequest, RequestError, TooLong

# Status -> the type of OpenAI's error, its code, and TGI's error_type.
_KINDS = {
    400: ("invalid_request_error", None, "validation"),
    401: ("authentication_error", "invalid_api_key", "authentication"),
    404: ("not_found_error", "model_not_found", "not_found"),
    408: ("timeout_error", None, "timeout"),
    429: ("rate_limit_error", "rate_limit_exceeded", "overloaded"),
    500: ("server_error", None, "generation"),
    503: ("service_unavailable_error", None, "unavailable"),
}
_STATUSES = {422: 400, 424: 500}  # OpenAI has no such codes


def _convert(names: dict[str, str], error: RequestError) -> tuple[int, ErrorBody]:
    status = http_status(error)
    status = _STATUSES.get(status, status)
    kind, code, tgi_kind = _KINDS.get(status) or _KINDS[400 if status < 500 else 500]
    message, param = error.detail, error.field if isinstance(error, InvalidRequest) else ""
    if isinstance(error, InvalidRequest):
        for name, field in names.items():
            message, param = message.replace(name, field), param.replace(name, field)
    if isinstance(error, TooLong):
        code = "context_length_exceeded"  # at this, or words of the message, agents shorten a history
        message = f"This model's maximum context length is {error.max_length} tokens, the prompt is too long: {message}"
    return status, ErrorBody(ErrorDetail(message, kind, param or None, code, status), tgi_kind)


_RESPONSES_FIELDS = FIELDS | {
    "max_new_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    ".function.": ".",
}

ERRORS = ErrorFormat("openai", ErrorBody, functools.partial(_convert, FIELDS), b"[DONE]")
RESPONSES_ERRORS = ErrorFormat("openai", ErrorBody, functools.partial(_convert, _RESPONSES_FIELDS))
