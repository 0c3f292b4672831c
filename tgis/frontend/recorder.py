"""Metrics, spans and log lines of a call to generate: the call once, each of its inputs once, however they end."""

import logging
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from tgis.errors import InvalidRequest, Overloaded, QueueFull, RequestError, Unavailable
from tgis.frontend.calls import CallKind, GenerateCall
from tgis.frontend.metric_families import FailureReason
from tgis.frontend.metrics import Metrics
from tgis.frontend.output import Output
from tgis.frontend.request_log import log_call_failure, log_output
from tgis.tracing import Tracer

_PHASES = "queue", "prefill", "decode"


class CallRecorder:
    """Records one call; a context manager around its life."""

    def __init__(self, call: GenerateCall, metrics: Metrics, tracer: Tracer | None = None, *, log_text: bool) -> None:
        self.started = time.monotonic()
        self._call = call
        self._metrics = metrics
        self._tracer = tracer
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
            log_call_failure(self._call, error, level=_level(error) if self._outputs else logging.INFO)
        elif error is not None and not self._outputs:  # cancelled before its inputs were queued
            self._metrics.request_failed(FailureReason.CANCELLED, self._call.num_outputs)
        if self._tracer and error is not None and not self._outputs:
            self._tracer.record(self._call.headers, self.started, error=type(error).__name__)
        for output in list(self._open):
            self.finish(output)
        for output in self._outputs:
            answered = 0 if error and self._call.kind is not CallKind.STREAM else output.num_generated
            self._metrics.batches.discarded_tokens.inc(output.engine_output.num_tokens - answered)

    def submitted(self, outputs: Sequence[Output]) -> None:
        """The call is valid, and its requests are queued."""
        self._outputs, self._open = outputs, list(outputs)
        requests, timings = self._metrics.requests, outputs[0].engine_output.timings
        requests.validation.observe(timings.submitted - timings.arrived)
        for output in outputs:
            requests.input_length.observe(output.request.input_length)
            requests.max_new_tokens.observe(output.params.max_new_tokens)

    def finish(self, output: Output) -> None:
        """Record the end of one input: finished, failed, or cancelled by its client or a failed sibling."""
        self._open.remove(output)
        error = output.engine_output.error
        if output.stop_reason:
            self._metrics.request_succeeded(self._call.kind, output)
        elif error is None:
            self._metrics.request_failed(FailureReason.CANCELLED)
        ended = output.stop_reason.name if output.stop_reason else "ERROR" if error else "CANCELLED"
        level = logging.INFO if error is None else _level(error)
        log_output(self._call, output, ended, level, num_outputs=len(self._outputs), log_text=self._log_text)
        if self._tracer:
            self._trace(self._tracer, output, ended)

    def _trace(self, tracer: Tracer, output: Output, ended: str) -> None:
        timings, request, error = output.engine_output.timings, output.request, output.engine_output.error
        marks = [timings.submitted, timings.scheduled, timings.first_token, timings.last_token]
        attributes = {
            "gen_ai.request.max_tokens": request.max_new_tokens,
            "gen_ai.request.temperature": request.sampling_params.temperature,
            "gen_ai.request.top_p": request.sampling_params.top_p,
            "gen_ai.response.finish_reasons": [ended.lower()],
            "gen_ai.usage.input_tokens": request.input_length,
            "gen_ai.usage.output_tokens": output.num_generated,
        }
        if request.adapter:
            attributes["gen_ai.request.model"] = request.adapter.id
        phases = [phase for phase in zip(_PHASES, marks, marks[1:], strict=False) if all(phase[1:])]
        problem = None if output.stop_reason else type(error).__name__ if error else ended
        tracer.record(self._call.headers, timings.arrived, phases, attributes, problem)


def _level(error: RequestError) -> int:
    """The log level of an error of the engine; a grammar that cannot be followed is the client's."""
    return logging.INFO if isinstance(error, InvalidRequest) else logging.ERROR


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
