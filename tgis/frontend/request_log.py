"""What is counted and logged about a call: the call once, each of its inputs once, however they end."""

import logging
import time
from types import TracebackType
from typing import Any, Self

import msgspec

from tgis.errors import InvalidRequest, Overloaded, RequestError, Unavailable, Unimplemented
from tgis.frontend.calls import CallKind
from tgis.frontend.metrics import FailureReason, Metrics
from tgis.frontend.output import LOGGED_CHARACTERS, OutputBuilder
from tgis.frontend.sampling_params import ResolvedParams
from tgis.ipc.request import Request, SamplingParams, StopReason

log = logging.getLogger(__name__)

_DEFAULTS = msgspec.structs.asdict(SamplingParams()) | {"stop_sequences": 0, "time_limit": False, "details": False}


class RequestLog:
    """The account of one call to generate: a context manager around its life."""

    def __init__(self, kind: CallKind, inputs: int, metrics: Metrics, *, log_text: bool) -> None:
        self._kind = kind
        self._metrics = metrics
        self._started = time.monotonic()
        self._log_text = log_text
        self._outputs: list[OutputBuilder] = []  # still open
        self._num_unsubmitted = inputs
        metrics.request_started(kind, inputs)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if isinstance(error, RequestError):
            self._metrics.request_failed(_failure_reason(error))
            level = logging.INFO if isinstance(error, InvalidRequest | Unimplemented) else logging.ERROR
            log.log(level, "%s call failed: %s", self._kind, error)
        elif error is not None and self._num_unsubmitted:  # its client left before its inputs were queued
            self._metrics.request_failed(FailureReason.CANCELLED, self._num_unsubmitted)
        for row in list(self._outputs):
            self.finish(row)

    def inputs_tokenized(self, lengths: list[int]) -> None:
        """Note the lengths of the inputs before truncation."""
        for length in lengths:
            self._metrics.input_tokenized(length)

    def validated(self, requests: list[Request], settings: ResolvedParams) -> None:
        """Note that the call is valid."""
        lengths = [request.input_length for request in requests]
        self._metrics.request_validated(lengths, settings.max_new_tokens, time.monotonic() - self._started)

    def track(self, rows: list[OutputBuilder]) -> list[OutputBuilder]:
        """Note the rows that run from now on."""
        self._outputs = list(rows)
        self._num_unsubmitted = 0
        return rows

    def finish(self, row: OutputBuilder) -> None:
        """Note the end of a row: finished, failed, or left behind by its client or for a failed sibling."""
        self._outputs.remove(row)
        if row.stop_reason:
            self._record_success(row)
        elif not row.queue.failed:
            self._metrics.request_failed(FailureReason.CANCELLED)
        self._log(row)

    def _record_success(self, row: OutputBuilder) -> None:
        times, now = row.queue.timings, time.monotonic()
        if row.expired_in_queue:
            self._metrics.request_failed(FailureReason.TIMEOUT)
        else:
            self._metrics.first_token(times.first_token - self._started)
        self._metrics.request_succeeded(
            self._kind,
            row.stop_reason,
            input_tokens=row.queue.request.input_length,
            generated_tokens=row.num_generated,
            duration=now - self._started,
            inference=times.last_token - times.scheduled if times.scheduled else 0.0,
            decoding=times.last_token - times.first_token,
        )

    def _log(self, row: OutputBuilder) -> None:
        how = row.stop_reason.name if row.stop_reason else "ERROR" if row.queue.failed else "CANCELLED"
        ordinary = row.stop_reason not in (StopReason.NOT_FINISHED, StopReason.TOKEN_LIMIT)
        log.log(
            logging.INFO if ordinary else logging.WARNING,
            "%s request: %d tokens, %s",
            self._kind,
            row.num_generated,
            how,
            extra=self._fields(row),
        )

    def _fields(self, row: OutputBuilder) -> dict[str, Any]:
        times, now, request = row.queue.timings, time.monotonic(), row.queue.request
        joined = times.scheduled or now
        inference = times.last_token - joined if times.last_token else 0.0
        return {
            "request_id": request.id,
            "input_tokens": request.input_length,
            "prefix_id": request.adapter.id if request.adapter else None,
            "generated_tokens": row.num_generated,
            "queue_seconds": round(joined - times.submitted, 4),
            "inference_seconds": round(inference, 4),
            "total_seconds": round(now - self._started, 4),
            "parameters": _describe_params(row),
            "input": row.input_text[:LOGGED_CHARACTERS] if self._log_text else None,
            "output": row.logged_text if self._log_text else None,
        }


def _describe_params(row: OutputBuilder) -> str:
    """What the input ran with: numbers and switches, never text."""
    request, settings = row.queue.request, row.params
    values = msgspec.structs.asdict(request.sampling_params) | {
        "max_new_tokens": request.max_new_tokens,
        "stop_sequences": len(settings.stop_sequences),
        "time_limit": settings.deadline is not None,
        "details": any((settings.logprob_options.generated_tokens, settings.logprob_options.input_tokens)),
    }
    return " ".join(f"{name}={value}" for name, value in values.items() if value != _DEFAULTS.get(name))


def _failure_reason(error: RequestError) -> FailureReason:
    match error:
        case Overloaded():
            return FailureReason.TOO_MANY
        case InvalidRequest() | Unimplemented():
            return FailureReason.VALIDATION
        case Unavailable():
            return FailureReason.UNKNOWN
    return FailureReason.GENERATION
