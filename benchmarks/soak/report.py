"""Formats the report of a soak: text for people, JSON for programs."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.soak.client_log import ClientLog
from benchmarks.soak.memory import MemoryMonitor

_MB = 1 << 20


@dataclass(frozen=True, slots=True)
class SoakReport:
    """The results of a soak."""

    seconds: float
    in_flight: int
    seed: int
    log: ClientLog
    monitor: MemoryMonitor
    preemptions: int  # of running sequences


def format_report(report: SoakReport) -> str:
    return "\n".join(_lines(report))


def to_json(report: SoakReport, *, samples: bool) -> dict[str, Any]:
    """The report as JSON values, with the memory samples if wanted."""
    log = report.log
    values: dict[str, Any] = {
        "seconds": round(report.seconds, 1),
        "in_flight": report.in_flight,
        "seed": report.seed,
        "calls": dict(log.calls),
        "left_before_an_answer": dict(log.uncertain_calls),
        "ends": _by_reason(log),
        "left": dict(log.abandoned),
        "expired": log.expired,
        "refused": dict(log.refused),
        "undecodable": log.malformed,
        "killed_clients": log.killed_clients,
        "preemptions": report.preemptions,
        "compared": log.compared,
        "tokens": log.tokens,
        "wrong": log.num_problems,
        "problems": log.problems,
        "memory": {name: asdict(trend) for name, trend in report.monitor.trends().items()},
    }
    if samples:
        values["samples"] = report.monitor.samples
    return values


def _lines(report: SoakReport) -> Iterator[str]:
    log = report.log
    yield f"{report.seconds:.0f} s, {report.in_flight} calls in flight, seed {report.seed}"
    yield f"calls       {_format_counts(log.calls + log.uncertain_calls)}; {log.malformed} malformed"
    yield f"ends        {_format_counts(Counter(_by_reason(log)))}; {log.expired} of them in the queue"
    yield f"left early  {sum(log.abandoned.values())} inputs, also those of {log.killed_clients} killed clients"
    yield f"refused     {_format_counts(log.refused)}; {report.preemptions} rows that ran were put back"
    yield f"compared    {log.compared} answers with those of the idle server"
    for name, trend in report.monitor.trends().items():
        medians = " ".join(f"{median / _MB:.0f}" for median in trend.medians)
        yield f"{name:<11} MB by minute: {medians}; {trend.growth:+.2%} a minute, now {trend.second_half_growth:+.2%}"
    yield from (f"WRONG       {problem}" for problem in log.problems)
    yield f"{log.num_problems} problems" if log.num_problems else "all is well"


def _by_reason(log: ClientLog) -> dict[str, int]:
    reasons: Counter[str] = Counter()
    for (_, reason), count in log.ends.items():
        reasons[reason] += count
    return dict(reasons)


def _format_counts(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "none"
