"""Metrics and log lines of a call: the call once, each of its inputs once, however they end."""

import logging
import time
from types import TracebackType
from typing import Any, Self

import msgspec

from tgis.errors import InvalidRequest, Overloaded, QueueFull, RequestError, Unavailable, Unimplemented
from tgis.frontend.calls import CallKind, GenerateCall
from tgis.frontend.metric_families import FailureReason
from tgis.frontend.metrics import Metrics
from tgis.frontend.output import LOGGED_CHARACTERS, OutputBuilder
from tgis.ipc.request import SamplingParams, StopReason

log = logging.getLogger(__name__)

_DEFAULTS = msgspec.structs.asdict(SamplingParams()) | {
    "logit_bias": 0,
    "stop_sequences": 0,
    "time_limit": False,
    "details": False,
}


class RequestLog:
    """Records one call to generate; a context manager around its life."""

    def __init__(self, call: GenerateCall, metrics: Metrics, *, log_text: bool) -> None:
        self._call = call
        self._metrics = metrics
        self.started = time.monotonic()
        self._log_text = log_text
        self._outputs: list[OutputBuilder] = []
        self._open: list[OutputBuilder] = []
        self._num_unsubmitted = call.num_outputs
        metrics.request_started(call.kind, call.num_outputs)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if isinstance(error, RequestError):
            self._metrics.request_failed(_failure_reason(error))
            level = logging.INFO if self._num_unsubmitted else _level(type(error))
            log.log(level, "%s call failed: %s", self._call.kind, error.logged)
        elif error is not None and self._num_unsubmitted:  # cancelled before its inputs were queued
            self._metrics.request_failed(FailureReason.CANCELLED, self._num_unsubmitted)
        for output in list(self._open):
            self.finish(output)
        for output in self._outputs:
            answered = 0 if error and self._call.kind is not CallKind.STREAM else output.num_generated
            self._metrics.batches.discarded_tokens.inc(output.queue.num_tokens - answered)

    def submitted(self, outputs: list[OutputBuilder]) -> None:
        """Take note of the outputs of a valid call."""
        self._outputs, self._open, self._num_unsubmitted = outputs, list(outputs), 0
        requests, timings = self._metrics.requests, outputs[0].queue.timings
        requests.validation.observe(timings.submitted - timings.arrived)
        for output in outputs:
            requests.input_length.observe(output.queue.request.input_length)
            requests.max_new_tokens.observe(output.params.given.max_new_tokens)

    def finish(self, output: OutputBuilder) -> None:
        """Record the end of one input: finished, failed, or cancelled by its client or a failed sibling."""
        self._open.remove(output)
        if output.stop_reason:
            self._count_success(output)
        elif not output.queue.failed:
            self._metrics.request_failed(FailureReason.CANCELLED)
        ended = output.stop_reason.name if output.stop_reason else "ERROR" if output.queue.failed else "CANCELLED"
        cut_short = output.stop_reason is StopReason.TOKEN_LIMIT and not output.params.fill_context
        as_asked = output.stop_reason is not StopReason.NOT_FINISHED and not cut_short
        log.log(
            _level(output.queue.failed) if output.queue.failed else logging.INFO if as_asked else logging.WARNING,
            "%s request%s: %d tokens, %s",
            self._call.kind,
            f" {output.index + 1} of {len(self._outputs)}" if self._call.kind is CallKind.BATCH else "",
            _num_generated(output),
            ended,
            extra=self._fields(output),
        )

    def _count_success(self, output: OutputBuilder) -> None:
        if output.expired_in_queue:
            self._metrics.request_failed(FailureReason.TIMEOUT)
        timings = output.queue.timings
        self._metrics.request_succeeded(
            self._call.kind,
            output.stop_reason,
            input_tokens=output.queue.request.input_length,
            generated_tokens=output.num_generated,
            duration=time.monotonic() - self.started,
            inference=timings.last_token - timings.scheduled if timings.scheduled else 0.0,
            decoding=timings.last_token - timings.first_token,
        )

    def _request_id(self, output: OutputBuilder) -> str | int:
        """The correlation id with the index of the output, as in vllm-tgis-adapter; else the engine's id."""
        if self._call.correlation_id is None:
            return output.queue.request.id
        alone = self._call.kind is CallKind.STREAM and len(self._outputs) == 1
        return self._call.correlation_id + ("" if alone else f"-{output.index}")

    def _fields(self, output: OutputBuilder) -> dict[str, Any]:
        timings, now, request = output.queue.timings, time.monotonic(), output.queue.request
        scheduled = timings.scheduled or now
        inference = timings.last_token - scheduled if timings.last_token else 0.0
        return {
            "request_id": self._request_id(output),
            "input_tokens": request.input_length,
            "prefix_id": request.adapter.id if request.adapter else None,
            "generated_tokens": _num_generated(output),
            "validation_seconds": round(timings.submitted - timings.arrived, 4),
            "queue_seconds": round(scheduled - timings.submitted, 4),
            "inference_seconds": round(inference, 4),
            "seconds_per_token": round(inference / max(_num_generated(output), 1), 4),
            "total_seconds": round(now - self.started, 4),
            "parameters": _describe_params(output),
            "input": output.input_text[:LOGGED_CHARACTERS] if self._log_text else None,
            "output": output.logged_text if self._log_text else None,
        }


def _num_generated(output: OutputBuilder) -> int:
    """Tokens of the answer, or those generated until the call was cancelled or failed."""
    return output.num_generated if output.stop_reason else output.queue.num_tokens


def _describe_params(output: OutputBuilder) -> str:
    """Parameters other than the defaults: numbers and flags, never text."""
    request, options = output.queue.request, output.params.given.logprob_options
    values = msgspec.structs.asdict(request.sampling_params) | {
        "logit_bias": len(request.sampling_params.logit_bias or ()),
        "max_new_tokens": request.max_new_tokens,
        "stop_sequences": len(output.params.given.stop_sequences),
        "time_limit": request.deadline is not None,
        "details": options.generated_tokens or options.input_tokens,
        "grammar": output.params.given.grammar and output.params.given.grammar.kind,
    }
    return " ".join(f"{name}={value}" for name, value in values.items() if value != _DEFAULTS.get(name))


def _level(error_type: type[RequestError]) -> int:
    """The log level of an error of the engine; a grammar that cannot be followed is the client's."""
    return logging.INFO if issubclass(error_type, InvalidRequest) else logging.ERROR


def _failure_reason(error: RequestError) -> FailureReason:
    match error:
        case QueueFull():
            return FailureReason.QUEUE_FULL
        case Overloaded():
            return FailureReason.TOO_MANY
        case InvalidRequest() | Unimplemented():
            return FailureReason.VALIDATION
        case Unavailable():
            return FailureReason.UNKNOWN
    return FailureReason.GENERATION
