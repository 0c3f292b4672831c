"""tgis.api.grpc.status: errors as codes, texts and details of gRPC."""

from typing import Any
from unittest.mock import Mock

import grpc
import tables
from google.rpc import error_details_pb2, status_pb2
from harness import run_async
from tables import table

from tgis.api.grpc.status import abort, status_name
from tgis.errors import RETRY_SECONDS, InvalidRequest, Overloaded, RequestError


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
    if status.details:
        assert (status.code, status.message) == (grpc.StatusCode[context.code].value[0], context.message)
    return context, list(status.details)


@table("errors", "errors")
@run_async
async def test_codes_and_texts(row: dict[str, Any]) -> None:
    if "grpc" not in row:
        return  # an error of HTTP
    context, details = await aborted(error := tables.error(row))
    assert {"code": context.code, "message": context.message} == row["grpc"]
    assert bool(details) == isinstance(error, InvalidRequest | Overloaded)


def test_statuses_are_named_for_codes_and_for_their_numbers() -> None:
    names = [status_name(Mock(code=lambda code=code: code)) for code in (grpc.StatusCode.OK, 8, 99)]
    assert names == ["OK", "RESOURCE_EXHAUSTED", "UNKNOWN"]


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
    assert (await aborted(InvalidRequest("text", "x" * 1000)))[0].message == "x" * 1000
    context, details = await aborted(InvalidRequest("text", "x" + "ä" * 20_000))
    assert context.message == "x" + "ä" * 499 + " ..."
    assert len(details[0].value) < 2000
