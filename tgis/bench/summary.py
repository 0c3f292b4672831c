"""The figures of a level, computed from its records once it is over.

Only successful requests count, except in `failed`. Percentiles are exact, interpolated linearly between the
two nearest values (Hyndman and Fan's type 7, numpy's default). Rates are per second from the first
scheduled request to the last end. Time to first token and latency start at the scheduled time. Time per
output token is, for each request, (last - first output) / (tokens after the first message with output).
"""

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tgis.bench.client import RequestRecord

TIMES = ("ttft", "tpot", "gap", "latency")
Percentiles = dict[str, float | None]


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of a level."""

    ok: int
    failed: dict[str, int]  # failures by status code
    short: int  # succeeded with fewer tokens than requested
    duration_s: float
    input_tokens: int
    output_tokens: int
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    ttft_ms: Percentiles
    tpot_ms: Percentiles
    max_gap_ms: Percentiles
    latency_ms: Percentiles
    send_delay_ms: Percentiles  # delay between the scheduled and the actual start, added by the load generator itself
    client_cpu: float  # share of one core that the load generator used
    server_cpu_us_per_token: float | None  # CPU time of --server-pid per output token


def percentiles(seconds: Sequence[float]) -> Percentiles:
    """Percentiles of one figure over the requests, in milliseconds; None if no request has it."""
    if len(seconds) < 2:
        return dict.fromkeys(("p50", "p90", "p99"), 1000 * seconds[0] if seconds else None)
    hundredths = statistics.quantiles(seconds, n=100, method="inclusive")
    return {f"p{percent}": 1000 * hundredths[percent - 1] for percent in (50, 90, 99)}


def request_times(record: RequestRecord) -> dict[str, float]:
    """Seconds by name, of `TIMES`; unary calls and streams of one message do not have all."""
    times = {"latency": record.ended_at - record.scheduled_at}
    if record.first_output_at:
        times["ttft"] = record.first_output_at - record.scheduled_at
    if record.last_output_at > record.first_output_at:
        times["gap"] = record.max_gap
        if tokens := record.output_tokens - record.first_message_tokens:
            times["tpot"] = (record.last_output_at - record.first_output_at) / tokens
    return times


def summarize(
    records: Sequence[RequestRecord],
    cpu_seconds: float,
    server_cpu_seconds: float | None = None,
) -> Summary:
    """The figures of the finished requests."""
    finished = [record for record in records if record.status]
    ok = [record for record in finished if record.status == "OK"]
    duration = max((s.ended_at for s in finished), default=0.0) - min((s.scheduled_at for s in finished), default=0.0)
    rate = 1 / duration if duration else 0.0
    times = [request_times(record) for record in ok]
    columns = {name: percentiles([row[name] for row in times if name in row]) for name in TIMES}
    tokens_in, tokens_out = sum(s.input_tokens for s in ok), sum(s.output_tokens for s in ok)
    return Summary(
        ok=len(ok),
        failed=dict(Counter(record.status for record in finished if record.status != "OK")),
        short=sum(record.output_tokens < record.requested_tokens for record in ok),
        duration_s=duration,
        input_tokens=tokens_in,
        output_tokens=tokens_out,
        requests_per_s=len(ok) * rate,
        input_tokens_per_s=tokens_in * rate,
        output_tokens_per_s=tokens_out * rate,
        ttft_ms=columns["ttft"],
        tpot_ms=columns["tpot"],
        max_gap_ms=columns["gap"],
        latency_ms=columns["latency"],
        send_delay_ms=percentiles([record.sent_at - record.scheduled_at for record in finished]),
        client_cpu=cpu_seconds * rate,
        server_cpu_us_per_token=server_cpu_seconds * 1e6 / tokens_out if server_cpu_seconds and tokens_out else None,
    )
