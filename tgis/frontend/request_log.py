"""The log lines of calls to generate. No text of requests, unless LOG_TEXT."""

import logging
import time
from typing import Any

import msgspec

from tgis.errors import RequestError
from tgis.frontend.calls import CallKind, GenerateCall
from tgis.frontend.output import LOGGED_CHARACTERS, Output
from tgis.ipc.request import SamplingParams, StopReason
from tgis.utils import logs

log = logging.getLogger(__name__)

_COUNTED = ("logit_bias", "stop_token_ids", "allowed_token_ids", "bad_words")
_DEFAULTS = msgspec.structs.asdict(SamplingParams())


def log_call_failure(call: GenerateCall, error: RequestError, level: int) -> None:
    log.log(level, "%s call failed: %s", call.kind, error.logged)


def log_output(call: GenerateCall, output: Output, ended: str, level: int, *, num_outputs: int, log_text: bool) -> None:
    """Log the end of one input; an output that was cut short by the context is a warning."""
    cut_short = output.stop_reason is StopReason.TOKEN_LIMIT and not output.params.fill_context
    num_tokens = output.num_generated if output.stop_reason else output.engine_output.num_tokens
    log.log(
        logging.WARNING if cut_short else level,
        "%s request%s: %d tokens, %s",
        call.kind,
        f" {output.index + 1} of {num_outputs}" if call.kind is CallKind.BATCH else "",
        num_tokens,
        ended,
        extra=_fields(call, output, num_tokens, num_outputs=num_outputs, log_text=log_text),
    )


def _fields(call: GenerateCall, output: Output, num_tokens: int, *, num_outputs: int, log_text: bool) -> dict[str, Any]:
    timings, now, request = output.engine_output.timings, time.monotonic(), output.request
    alone = call.kind is CallKind.STREAM and num_outputs == 1
    correlation_id, index = logs.correlation_id(), "" if alone else f"-{output.index}"
    return {
        "request_id": request.id if correlation_id is None else correlation_id + index,  # same ids in vllm-tgis-adapter
        "api": call.api,
        "input_tokens": request.input_length,
        "prefix_id": request.adapter.id if request.adapter else None,
        "generated_tokens": num_tokens,
        "validation_seconds": round(timings.submitted - timings.arrived, 4),
        "queue_seconds": round((timings.scheduled or now) - timings.submitted, 4),
        "inference_seconds": round(timings.inference, 4),
        "seconds_per_token": round(timings.inference / max(num_tokens, 1), 4),
        "total_seconds": round(now - timings.arrived, 4),
        "parameters": _describe_params(output),
        "input": output.input_text[:LOGGED_CHARACTERS] if log_text else None,
        "output": output.logged_text if log_text else None,
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
    shown = [f"{name}={value}" for name, value in values.items() if value and value != _DEFAULTS.get(name)]
    return " ".join(shown)
