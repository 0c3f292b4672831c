"""TGI's headers about what an answer has taken, which the answers of all faces have."""

import time
from collections.abc import Sequence

from tgis.frontend.output import RequestOutput


def timing_headers(
    outputs: Sequence[RequestOutput], num_input_tokens: int, *, compute_time: bool = True
) -> dict[str, str]:
    """Sums over whole outputs, from the arrival of the call to now, in milliseconds.

    With `compute_time` also how long the call has taken, in seconds.
    """
    now = time.monotonic()
    first = outputs[0].timings
    assert first is not None
    seconds = dict.fromkeys(("total", "validation", "queue", "inference"), 0.0)
    per_token = 0.0
    for output in outputs:
        times = output.timings
        assert times is not None
        scheduled = times.scheduled or now
        seconds["total"] += now - times.arrived
        seconds["validation"] += times.submitted - times.arrived
        seconds["queue"] += scheduled - times.submitted
        seconds["inference"] += now - scheduled
        per_token += (now - scheduled) / max(output.generated_token_count, 1)
    return {
        **({"x-compute-time": f"{now - first.arrived:.9f}"} if compute_time else {}),
        **{f"x-{name}-time": _milliseconds(value) for name, value in seconds.items()},
        "x-time-per-token": _milliseconds(per_token),
        "x-prompt-tokens": str(num_input_tokens),
        "x-generated-tokens": str(sum(output.generated_token_count for output in outputs)),
    }


def _milliseconds(seconds: float) -> str:
    return str(int(seconds * 1000))
