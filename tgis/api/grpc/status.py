"""Statuses of gRPC calls: exceptions as status codes with details."""

from typing import Any, TypeAlias

import grpc
from google.rpc import error_details_pb2, status_pb2

from tgis.api.grpc import convert
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

# The text is in the trailers up to three times, and clients accept 8 KiB of trailers.
_MAX_STATUS_BYTES = 1000

_STATUS_CODES: dict[type[RequestError], grpc.StatusCode] = {
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    OutOfMemory: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
    ClientTimeout: grpc.StatusCode.DEADLINE_EXCEEDED,
    EngineFailure: grpc.StatusCode.INTERNAL,
}

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


def status_name(context: Context) -> str:
    """The status that a call was ended with."""
    return next((code.name for code in grpc.StatusCode if context.code() in (code, code.value[0])), "UNKNOWN")


async def abort(context: Context, error: RequestError) -> None:
    """End the call with the status of an error and the trailing metadata set before; raises AbortError."""
    code = next(code for kind, code in _STATUS_CODES.items() if isinstance(error, kind))
    message = _limited(str(error))
    details: list[Any] = []
    match error:
        case InvalidRequest(field=field):
            bad = error_details_pb2.BadRequest()
            bad.field_violations.add(field=convert.field_path(field), description=_limited(error.detail))
            details = [bad]
        case Overloaded():
            retry, quota = error_details_pb2.RetryInfo(), error_details_pb2.QuotaFailure()
            retry.retry_delay.FromSeconds(RETRY_SECONDS)
            quota.violations.add(description=_limited(error.detail))
            details = [retry, quota]
    metadata: Any = context.trailing_metadata()
    if details:  # machine-readable; values that TGIS's message leaves out are only there
        status = status_pb2.Status(code=code.value[0], message=message)
        for detail in details:
            status.details.add().Pack(detail)
        metadata = (*metadata, ("grpc-status-details-bin", status.SerializeToString()))
    await context.abort(code, message, metadata)


def _limited(text: str) -> str:
    data = text.encode(errors="replace")
    return text if len(data) <= _MAX_STATUS_BYTES else data[:_MAX_STATUS_BYTES].decode(errors="ignore") + " ..."
