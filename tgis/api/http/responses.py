"""Answers that are not streams: JSON, the order of several outputs, and TGI's headers with the time they took."""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from aiohttp import web

from tgis.frontend.output import RequestOutput

NO_STORE = {"Cache-Control": "no-store"}


def json_response(body: Any, headers: Mapping[str, str] | None = None) -> web.Response:
    """An answer that is a value of msgspec, or JSON already."""
    data = body if isinstance(body, bytes) else msgspec.json.encode(body)
    return web.Response(body=data, content_type="application/json", headers=headers)


def best_first(outputs: Iterable[RequestOutput]) -> list[RequestOutput]:
    """Sort by the mean of the logprobs of the tokens, which must have been asked for; of equal ones the first."""
    return sorted(outputs, key=_mean_logprob, reverse=True)


def _mean_logprob(output: RequestOutput) -> float:
    mean = sum(token.logprob for token in output.tokens) / len(output.tokens) if output.tokens else math.nan
    return -math.inf if math.isnan(mean) else mean


def timing_headers(outputs: Sequence[RequestOutput], num_input_tokens: int) -> dict[str, str]:
    """Sums over whole outputs of a call, from its arrival to now, in milliseconds; x-compute-time is in seconds."""
    now = time.monotonic()
    seconds = dict.fromkeys(("validation", "queue", "inference"), 0.0)
    per_token = 0.0
    for output in outputs:
        times = output.timings
        assert times is not None
        scheduled = times.scheduled or now
        seconds["validation"] += times.submitted - times.arrived
        seconds["queue"] += scheduled - times.submitted
        seconds["inference"] += now - scheduled
        per_token += (now - scheduled) / max(output.generated_token_count, 1)
    seconds["total"] = sum(seconds.values())
    return {
        # The time of the call, not the sum.
        "x-compute-time": f"{seconds['total'] / len(outputs):.9f}",
        **{f"x-{name}-time": _milliseconds(value) for name, value in seconds.items()},
        "x-time-per-token": _milliseconds(per_token),
        "x-prompt-tokens": str(num_input_tokens),
        "x-generated-tokens": str(sum(output.generated_token_count for output in outputs)),
    }


def _milliseconds(seconds: float) -> str:
    return str(int(seconds * 1000))
