"""How a soak is shown: a page for people, JSON for programs."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.soak.ledger import Ledger
from benchmarks.soak.memory import Watch

_MB = 1 << 20


@dataclass(frozen=True, slots=True)
class Report:
    """All that is known of a soak."""

    seconds: float
    in_flight: int
    seed: int
    ledger: Ledger
    watch: Watch
    preemptions: int  # rows whose blocks were taken away


def text(report: Report) -> str:
    """The page."""
    return "\n".join(_lines(report))


def document(report: Report, *, samples: bool) -> dict[str, Any]:
    """JSON values, with the samples of memory if wanted."""
    ledger = report.ledger
    values: dict[str, Any] = {
        "seconds": round(report.seconds, 1),
        "in_flight": report.in_flight,
        "seed": report.seed,
        "calls": dict(ledger.calls),
        "left_before_an_answer": dict(ledger.unsure_calls),
        "ends": _by_reason(ledger),
        "left": dict(ledger.left),
        "expired": ledger.expired,
        "refused": dict(ledger.refused),
        "undecodable": ledger.undecodable,
        "killed_clients": ledger.killed,
        "preemptions": report.preemptions,
        "compared": ledger.compared,
        "tokens": ledger.tokens,
        "wrong": ledger.wrong,
        "problems": ledger.problems,
        "memory": {name: asdict(trend) for name, trend in report.watch.trends().items()},
    }
    if samples:
        values["samples"] = report.watch.samples
    return values


def _lines(report: Report) -> Iterator[str]:
    ledger = report.ledger
    yield f"{report.seconds:.0f} s, {report.in_flight} calls in flight, seed {report.seed}"
    yield f"calls       {_counts(ledger.calls + ledger.unsure_calls)}; {ledger.undecodable} that were no message"
    yield f"ends        {_counts(Counter(_by_reason(ledger)))}; {ledger.expired} of them in the queue"
    yield f"left early  {sum(ledger.left.values())} inputs, also those of {ledger.killed} killed clients"
    yield f"refused     {_counts(ledger.refused)}; {report.preemptions} rows that ran were put back"
    yield f"compared    {ledger.compared} answers with those of the idle server"
    for name, trend in report.watch.trends().items():
        medians = " ".join(f"{median / _MB:.0f}" for median in trend.medians)
        yield f"{name:<11} MB by minute: {medians}; {trend.growth:+.2%} a minute, lately {trend.late:+.2%}"
    yield from (f"WRONG       {problem}" for problem in ledger.problems)
    yield f"{ledger.wrong} problems" if ledger.wrong else "all is well"


def _by_reason(ledger: Ledger) -> dict[str, int]:
    reasons: Counter[str] = Counter()
    for (_, reason), count in ledger.ends.items():
        reasons[reason] += count
    return dict(reasons)


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "none"
