"""Compares the server's counters with what the clients saw: every input of every call must end exactly once."""

import math
from collections.abc import Iterator, Mapping

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.soak.client_log import ClientLog

MetricValues = dict[tuple[str, ...], float]  # (name, label values in the order of the label names) -> value

GAUGES = (
    "tgi_queue_size",
    "tgi_batch_current_size",
    "tgi_batch_input_tokens",
    "tgi_batch_max_remaining_tokens",
    "tgi_batch_weight_utilization",
)
PREEMPTIONS = ("tgi_batch_preemption_total",)
_CALL_KINDS = ("single", "batch", "stream")
_FAILURE_STATUSES = {
    "validation": ("INVALID_ARGUMENT", "UNIMPLEMENTED"),
    "conc_limit": ("RESOURCE_EXHAUSTED",),
    "queue_full": (),
    "generate": (),
    "unknown": (),
}


def parse_metrics(scrape: str) -> MetricValues:
    return {
        (sample.name, *(sample.labels[label] for label in sorted(sample.labels))): sample.value
        for family in text_string_to_metric_families(scrape)
        for sample in family.samples
    }


def nonzero_gauges(series: MetricValues) -> list[str]:
    return [f"{name} is {series[name,]:g}" for name in GAUGES if series[name,]]


def discrepancies(before: MetricValues, after: MetricValues, log: ClientLog) -> Iterator[str]:
    """Differences between the counters of a server that is idle again and the clients' log."""
    grown = _growth(before, after)
    yield from _check_calls(grown, log)
    yield from _check_ends(grown, log)
    for failure, statuses in _FAILURE_STATUSES.items():
        seen = sum(log.refused[status] for status in statuses)
        yield from _check_range(f"failures of kind {failure}", grown["tgi_request_failure_total", failure], seen, seen)


def _growth(before: MetricValues, after: MetricValues) -> MetricValues:
    return {key: value - before.get(key, 0.0) for key, value in after.items()}


def _check_calls(grown: Mapping[tuple[str, ...], float], log: ClientLog) -> Iterator[str]:
    for kind in _CALL_KINDS:
        least, unsure = log.calls[kind], log.uncertain_calls[kind]
        yield from _check_range(f"{kind} calls", grown["tgi_request_count_total", kind], least, least + unsure)
    least, unsure = log.inputs, log.uncertain_inputs
    yield from _check_range("inputs", grown["tgi_request_input_count_total",], least, least + unsure)


def _check_ends(grown: Mapping[tuple[str, ...], float], log: ClientLog) -> Iterator[str]:
    left = sum(log.abandoned.values())
    succeeded = {key[1:]: int(value) for key, value in grown.items() if key[0] == "tgi_request_success_total"}
    cancelled = grown["tgi_request_failure_total", "cancelled"]
    ends = sum(succeeded.values()) + cancelled + log.refused_inputs
    inputs = grown["tgi_request_input_count_total",]
    yield from _check_range("ends of inputs", ends, inputs, inputs)
    yield from _check_range("cancelled inputs", cancelled, 0, left)
    expired = grown["tgi_request_failure_total", "timeout"]
    yield from _check_range("expired inputs", expired, log.expired, log.expired + left)
    for (kind, reason), count in succeeded.items():
        seen = log.ends[kind, reason]
        yield from _check_range(f"{kind} inputs with {reason}", count, seen, seen + log.abandoned[kind])
    answered = grown["tgi_batch_generated_tokens_total",] - grown["tgi_batch_discarded_tokens_total",]
    yield from _check_range("tokens in answers", answered, log.tokens, math.inf)
    yield from _check_range("tokens", grown["tgi_request_generated_tokens_sum",], log.tokens, math.inf)


def _check_range(what: str, counted: float, least: float, most: float) -> Iterator[str]:
    if not least <= counted <= most:
        expected = f"{least:g}" if least == most else f"{least:g} to {most:g}"
        yield f"{what}: the server counted {counted:g}, the clients {expected}"
