"""The figures of an attack, and which promises they break."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from benchmarks.soak.reconcile import MetricValues

_PROBE_SECONDS = 2.0  # of /health, /metrics and refusals
_SLOW_SECONDS = 5.0  # beyond CLIENT_TIMEOUT_SECONDS: clients are checked periodically
_MIN_SUCCESS = {False: 0.99, True: 0.90}  # by whether the attackers have a valid token
_MAX_LAG_MS = 250.0
MAX_GROWTH_MIB = 100.0
_MAX_DESCRIPTORS = 10_000  # connections to two ports, and the process's own files
_LAG = "tgi_event_loop_lag_duration_bucket"


@dataclass(slots=True)
class Figures:
    """What one attack did to the server and its honest clients."""

    attack: str
    authenticated: bool
    client_timeout: float
    answers: int = 0  # received by the attackers
    succeeded: int = 0
    failed: dict[str, int] = field(default_factory=dict)  # honest calls, by reason
    wrong: int = 0
    slowest_probe_s: float = 0.0
    refused_after_s: dict[str, float] = field(default_factory=dict)
    ended_after_s: dict[str, float] = field(default_factory=dict)
    lag_ms: float = 0.0
    descriptors: int = 0
    memory_mib: dict[str, float] = field(default_factory=dict)  # before, at most, and a minute later
    lost_streams: int = 0
    exit_code: int | None = None


def broken_promises(figures: Figures) -> Iterator[str]:
    """Which promises do not hold; nothing if all do."""
    yield from _broken_limits(figures)
    yield from _broken_for_honest_clients(figures)
    if figures.lost_streams:
        yield f"the drain lost {figures.lost_streams} streams"
    if figures.exit_code != 0:
        yield f"the server ended with exit code {figures.exit_code}"


def _broken_limits(figures: Figures) -> Iterator[str]:
    for name, seconds in figures.refused_after_s.items():
        if seconds > _PROBE_SECONDS:
            yield f"{name}: refused after {seconds:.1f} s, not {_PROBE_SECONDS:g}"
    for name, seconds in figures.ended_after_s.items():
        if seconds > figures.client_timeout + _SLOW_SECONDS:
            yield f"{name}: ended after {seconds:.1f} s, CLIENT_TIMEOUT_SECONDS is {figures.client_timeout:.1f}"
    if figures.descriptors > _MAX_DESCRIPTORS:
        yield f"the front end had {figures.descriptors} open files, not {_MAX_DESCRIPTORS}"


def _broken_for_honest_clients(figures: Figures) -> Iterator[str]:
    if not figures.answers:
        yield "no answer has reached the attackers"
    if figures.slowest_probe_s > _PROBE_SECONDS:
        yield f"a probe took {figures.slowest_probe_s:.1f} s, not {_PROBE_SECONDS:g}"
    success = figures.succeeded / max(figures.succeeded + sum(figures.failed.values()), 1)
    if success < _MIN_SUCCESS[figures.authenticated]:
        yield f"{success:.1%} of honest calls succeeded, not {_MIN_SUCCESS[figures.authenticated]:.0%}"
    if figures.wrong:
        yield f"{figures.wrong} honest answers were wrong"
    if figures.lag_ms > _MAX_LAG_MS:
        yield f"the event loop was held for {figures.lag_ms:.0f} ms, not {_MAX_LAG_MS:.0f}"
    if (growth := figures.memory_mib["after"] - figures.memory_mib["before"]) > MAX_GROWTH_MIB:
        yield f"the front end kept {growth:.0f} MiB, not {MAX_GROWTH_MIB:.0f}"


def max_lag_ms(before: MetricValues, after: MetricValues) -> float:
    """The longest time that the event loop was held between two scrapes: the upper edge of its bucket."""
    counts = {float(key[1]): value - before[key] for key, value in after.items() if key[0] == _LAG}
    return 1000 * min(edge for edge, count in counts.items() if count >= counts[math.inf])
