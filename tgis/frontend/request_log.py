"""Metrics and log lines of a call: the call once, each of its inputs once, however they end."""

import logging
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import msgspec

from tgis.errors import InvalidRequest, Overloaded, QueueFull, RequestError, Unavailable
from tgis.frontend.calls import CallKind, GenerateCall
from tgis.frontend.metric_families import FailureReason
from tgis.frontend.metrics import Metrics
from tgis.frontend.output import LOGGED_CHARACTERS, Output
from tgis.ipc.request import SamplingParams, StopReason
from tgis.tracing import Tracer
from tgis.utils import logs

log = logging.getLogger(__name__)

_COUNTED = ("logit_bias", "stop_token_ids", "allowed_token_ids", "bad_words")
_DEFAULTS = msgspec.structs.asdict(SamplingParams())
_PHASES = "queue", "prefill", "decode"


class RequestLog:
    """Records one call to generate; a context manager around its life."""

    def __init__(self, call: GenerateCall, metrics: Metrics, tracer: Tracer | None = None, *, log_text: bool) -> None:
        self._call = call
        self._metrics = metrics
        self._tracer = tracer
        self.started = time.monotonic()
        self._log_text = log_text
        self._outputs: Sequence[Output] = ()
        self._open: list[Output] = []
        metrics.request_started(call.kind, call.num_outputs)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if isinstance(error, RequestError):
            self._metrics.request_failed(_failure_reason(error))
            level = _level(type(error)) if self._outputs else logging.INFO
            log.log(level, "%s call failed: %s", self._call.kind, error.logged)
        elif error is not None and not self._outputs:  # cancelled before its inputs were queued
            self._metrics.request_failed(FailureReason.CANCELLED, self._call.num_outputs)
        if self._tracer and error is not None and not self._outputs:
            self._tracer.record(self._call.headers, self.started, error=type(error).__name__)
        for output in list(self._open):
            self.finish(output)
        for output in self._outputs:
            answered = 0 if error and self._call.kind is not CallKind.STREAM else output.num_generated
            self._metrics.batches.discarded_tokens.inc(output.num_tokens - answered)

    def submitted(self, outputs: Sequence[Output]) -> None:
        """Take note of the outputs of a valid call."""
        self._outputs, self._open = outputs, list(outputs)
        requests, timings = self._metrics.requests, outputs[0].timings
        requests.validation.observe(timings.submitted - timings.arrived)
        for output in outputs:
            requests.input_length.observe(output.request.input_length)
            requests.max_new_tokens.observe(output.params.max_new_tokens)

    def finish(self, output: Output) -> None:
        """Record the end of one input: finished, failed, or cancelled by its client or a failed sibling."""
        self._open.remove(output)
        if output.stop_reason:
            self._count_success(output)
        elif not output.failed:
            self._metrics.request_failed(FailureReason.CANCELLED)
        ended = output.stop_reason.name if output.stop_reason else "ERROR" if output.failed else "CANCELLED"
        cut_short = output.stop_reason is StopReason.TOKEN_LIMIT and not output.params.fill_context
        if self._tracer:
            self._trace(self._tracer, output, ended)
        num_tokens = output.num_generated if output.stop_reason else output.num_tokens  # of the answer, or of no answer
        log.log(
            _level(output.failed) if output.failed else logging.WARNING if cut_short else logging.INFO,
            "%s request%s: %d tokens, %s",
            self._call.kind,
            f" {output.index + 1} of {len(self._outputs)}" if self._call.kind is CallKind.BATCH else "",
            num_tokens,
            ended,
            extra=self._fields(output, num_tokens),
        )

    def _trace(self, tracer: Tracer, output: Output, ended: str) -> None:
        timings, request, params = output.timings, output.request, output.request.sampling_params
        marks = [timings.submitted, timings.scheduled, timings.first_token, timings.last_token]
        attributes = {
            "gen_ai.request.max_tokens": request.max_new_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.response.finish_reasons": [ended.lower()],
            "gen_ai.usage.input_tokens": request.input_length,
            "gen_ai.usage.output_tokens": output.num_generated,
        }
        if request.adapter:
            attributes["gen_ai.request.model"] = request.adapter.id
        tracer.record(
            self._call.headers,
            timings.arrived,
            [each for each in zip(_PHASES, marks, marks[1:], strict=False) if all(each[1:])],
            attributes,
            None if output.stop_reason else output.failed.__name__ if output.failed else ended,
        )

    def _count_success(self, output: Output) -> None:
        requests, timings, num_tokens = self._metrics.requests, output.timings, output.num_generated
        if output.expired_in_queue:
            self._metrics.request_failed(FailureReason.TIMEOUT)
        requests.success.labels(output.stop_reason.name, self._call.kind).inc()
        requests.generated_tokens.observe(num_tokens)
        requests.total_tokens.observe(output.request.input_length + num_tokens)
        requests.duration.observe(time.monotonic() - timings.arrived)
        requests.inference.observe(timings.inference)
        requests.mean_time_per_token.observe(timings.inference / num_tokens if num_tokens else 0.0)
        if num_tokens > 1:
            requests.time_per_output_token.observe((timings.last_token - timings.first_token) / (num_tokens - 1))

    def _fields(self, output: Output, num_tokens: int) -> dict[str, Any]:
        timings, now, request = output.timings, time.monotonic(), output.request
        alone = self._call.kind is CallKind.STREAM and len(self._outputs) == 1
        correlation_id, index = logs.correlation_id(), "" if alone else f"-{output.index}"
        return {
            "request_id": request.id if correlation_id is None else correlation_id + index,  # as in vllm-tgis-adapter
            "api": self._call.api,
            "input_tokens": request.input_length,
            "prefix_id": request.adapter.id if request.adapter else None,
            "generated_tokens": num_tokens,
            "validation_seconds": round(timings.submitted - timings.arrived, 4),
            "queue_seconds": round((timings.scheduled or now) - timings.submitted, 4),
            "inference_seconds": round(timings.inference, 4),
            "seconds_per_token": round(timings.inference / max(num_tokens, 1), 4),
            "total_seconds": round(now - timings.arrived, 4),
            "parameters": _describe_params(output),
            "input": output.input_text[:LOGGED_CHARACTERS] if self._log_text else None,
            "output": output.logged_text if self._log_text else None,
        }


def _describe_params(output: Output) -> str:
    """Parameters other than the defaults: numbers and flags, never text."""
    request, options = output.request, output.params.logprob_options
    values = msgspec.structs.asdict(request.sampling_params)
    values |= {
        **{name: len(values[name] or ()) for name in _COUNTED},
        "max_new_tokens": request.max_new_tokens,
        "stop_sequences": len(output.params.stop_sequences),
        "time_limit": request.deadline is not None,
        "details": options.generated_tokens or options.input_tokens,
        "grammar": output.params.grammar and output.params.grammar.kind,
    }
    return " ".join(f"{name}={value}" for name, value in values.items() if value and value != _DEFAULTS.get(name))


def _level(error_type: type[RequestError]) -> int:
    """The log level of an error of the engine; a grammar that cannot be followed is the client's."""
    return logging.INFO if issubclass(error_type, InvalidRequest) else logging.ERROR


def _failure_reason(error: RequestError) -> FailureReason:
    match error:
        case QueueFull():
            return FailureReason.QUEUE_FULL
        case Overloaded():
            return FailureReason.TOO_MANY
        case InvalidRequest():
            return FailureReason.VALIDATION
        case Unavailable():
            return FailureReason.UNKNOWN
    return FailureReason.GENERATION
