"""Samples the memory of the server's processes every second, and judges whether it levels off."""

import asyncio
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

_SAMPLE_SECONDS = 1.0  # between samples
_JUDGED_MINUTES = 10  # the last ones are judged
_MAX_GROWTH = 0.01  # share per minute
_LEVEL_GROWTH = 0.0025  # share per minute that counts as level


@dataclass(frozen=True, slots=True)
class Trend:
    """The medians of the last minutes, and their growth as a share per minute."""

    medians: list[int]  # bytes, of each minute
    growth: float
    first_half_growth: float
    second_half_growth: float

    @property
    def problem(self) -> str:
        """What is wrong; '' if nothing or if there are too few minutes to tell."""
        if len(self.medians) < _JUDGED_MINUTES:
            return ""
        if self.growth >= _MAX_GROWTH:
            return f"memory grows by {self.growth:.2%} a minute"
        if self.second_half_growth > max(_LEVEL_GROWTH, self.first_half_growth / 2):
            return (
                f"memory does not level off: {self.first_half_growth:.2%} a minute, then {self.second_half_growth:.2%}"
            )
        return ""


@dataclass(slots=True)
class MemoryMonitor:
    """Samples the memory of processes, by name, and the health of the server."""

    processes: Mapping[str, int]  # name: pid
    healthy: Callable[[], bool]
    samples: dict[str, list[tuple[float, int]]] = field(default_factory=dict)  # seconds, bytes
    unhealthy: int = 0  # samples at which the server was not healthy

    async def run(self, seconds: float) -> None:
        start = time.monotonic()
        while time.monotonic() - start < seconds:
            self.unhealthy += not await asyncio.to_thread(self.healthy)
            for name, pid in self.processes.items():
                self.samples.setdefault(name, []).append((time.monotonic() - start, resident_bytes(pid)))
            await asyncio.sleep(_SAMPLE_SECONDS)

    def problems(self) -> Iterator[str]:
        if self.unhealthy:
            yield f"/health was not 200 {self.unhealthy} times"
        yield from (f"{name}: {trend.problem}" for name, trend in self.trends().items() if trend.problem)

    def trends(self) -> dict[str, Trend]:
        return {name: compute_trend(samples) for name, samples in self.samples.items()}


def resident_bytes(pid: int, field: str = "VmRSS") -> int:
    """Resident memory of a process in bytes; with VmHWM its peak."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"process {pid} has no memory")


def compute_trend(samples: list[tuple[float, int]]) -> Trend:
    """The trend over the last whole minutes of ascending samples."""
    end = samples[-1][0]
    minutes = min(int(end // 60), _JUDGED_MINUTES)
    edges = [end - 60 * left for left in range(minutes, -1, -1)]
    medians = [
        int(statistics.median(size for at, size in samples if begin < at <= stop)) for begin, stop in pairwise(edges)
    ]
    half = len(medians) // 2
    return Trend(medians, _growth(medians), _growth(medians[: half + 1]), _growth(medians[half:]))


def _growth(medians: list[int]) -> float:
    """The average growth from one value to the next, as a share."""
    return (medians[-1] / medians[0]) ** (1 / (len(medians) - 1)) - 1 if len(medians) > 1 else 0.0
