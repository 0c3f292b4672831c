"""tgis.api.grpc.status: errors as codes, texts and details of gRPC."""

from typing import Any

import pytest
from google.rpc import error_details_pb2, status_pb2
from harness import run_async

from tgis.api.grpc.status import abort
from tgis.errors import (
    RETRY_SECONDS,
    ClientTimeout,
    EngineFailure,
    InvalidRequest,
    OutOfMemory,
    Overloaded,
    QueueFull,
    RequestError,
    TooLong,
    Unavailable,
)


class Context:
    """Keeps the status that a call ends with."""

    def trailing_metadata(self) -> Any:
        return (("x-correlation-id", "me"),)

    async def abort(self, code: Any, message: str, metadata: Any) -> None:
        self.code, self.message, self.metadata = code.name, message, dict(metadata)


async def aborted(error: RequestError) -> tuple[Context, list[Any]]:
    """The status, and its details."""
    context: Any = Context()
    await abort(context, error)
    assert context.metadata.pop("x-correlation-id") == "me"
    status = status_pb2.Status.FromString(context.metadata.pop("grpc-status-details-bin", b""))
    assert context.metadata == {}
    return context, list(status.details)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidRequest("", "bad"), "INVALID_ARGUMENT"),
        (TooLong("text", "too long", 9), "INVALID_ARGUMENT"),
        (Overloaded("full"), "RESOURCE_EXHAUSTED"),
        (QueueFull("full"), "RESOURCE_EXHAUSTED"),
        (OutOfMemory("too large"), "RESOURCE_EXHAUSTED"),
        (Unavailable("gone"), "UNAVAILABLE"),
        (ClientTimeout(1.0), "DEADLINE_EXCEEDED"),
        (EngineFailure("it broke"), "INTERNAL"),
    ],
)
@run_async
async def test_codes_and_texts(error: RequestError, code: str) -> None:
    context, details = await aborted(error)
    assert (context.code, context.message) == (code, str(error))
    assert bool(details) == isinstance(error, InvalidRequest | Overloaded)


@run_async
async def test_details() -> None:
    bad, retry, quota = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo(), error_details_pb2.QuotaFailure()
    _, (detail,) = await aborted(InvalidRequest("top_k", "top_k is bad", "7"))
    assert detail.Unpack(bad)
    violation = error_details_pb2.BadRequest.FieldViolation
    assert list(bad.field_violations) == [violation(field="params.sampling.top_k", description="top_k is bad, got 7")]
    _, (first, second) = await aborted(Overloaded("3 inputs"))
    assert first.Unpack(retry)
    assert second.Unpack(quota)
    assert retry.retry_delay.ToSeconds() == RETRY_SECONDS
    assert quota.violations[0].description == "Model is overloaded: 3 inputs"


@run_async
async def test_texts_are_limited_to_what_trailers_may_have() -> None:
    context, details = await aborted(InvalidRequest("text", "ä" * 20_000))
    assert context.message == "ä" * 500 + " ..."
    assert len(details[0].value) < 2000
