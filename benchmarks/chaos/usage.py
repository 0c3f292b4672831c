"""Resources of the two processes: an idle server must hold no more than when it was first idle."""

import asyncio
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations

from benchmarks.serving import Server
from benchmarks.soak.memory import resident_bytes

_SPARE_DESCRIPTORS = 16
_SPARE_THREADS = 32  # of pools that grow with their work
_RETURN_SECONDS = 20.0  # until connections of killed clients are closed
_JUDGED_SECONDS = 600.0  # memory is judged over the last of them
_MAX_GROWTH = 0.01  # share per minute
_MAX_FRONT_END_BYTES = 700 << 20  # the promise to honest clients


@dataclass(frozen=True, slots=True)
class Usage:
    """File descriptors and threads of one process."""

    descriptors: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> "Usage":
        return cls(len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task")))

    def exceeds(self, other: "Usage") -> bool:
        return (
            self.descriptors > other.descriptors + _SPARE_DESCRIPTORS or self.threads > other.threads + _SPARE_THREADS
        )


@dataclass(slots=True)
class Life:
    """One life of the server, from its start to its exit."""

    server: Server
    first: dict[str, Usage] = field(default_factory=dict)  # when it was first idle
    memory: dict[str, list[tuple[float, int]]] = field(default_factory=dict)  # minutes, bytes; whenever it was idle

    peaks: dict[str, int] = field(default_factory=dict)  # bytes

    async def check(self) -> list[str]:
        """Record what the idle server holds; return what it has not released."""
        until = time.monotonic() + _RETURN_SECONDS
        while (leaks := list(self._leaks())) and time.monotonic() < until:
            await asyncio.sleep(0.2)
        for name, pid in self._processes().items():
            self.memory.setdefault(name, []).append((time.monotonic() / 60, resident_bytes(pid)))
            self.peaks[name] = resident_bytes(pid, "VmHWM")
        if (peak := self.peaks["front end"]) > _MAX_FRONT_END_BYTES:
            leaks.append(f"the front end had {peak >> 20} MiB, not {_MAX_FRONT_END_BYTES >> 20}")
        return leaks

    def slopes(self) -> dict[str, float]:
        """Growth of memory by process over the last minutes, in bytes per minute."""
        return {name: _slope(samples) for name, samples in self.memory.items()}

    def growth(self) -> Iterator[str]:
        """Processes whose memory grows, once there are enough samples."""
        for name, slope in self.slopes().items():
            samples = self.memory[name]
            if samples[-1][0] - samples[0][0] >= _JUDGED_SECONDS / 60 and slope > _MAX_GROWTH * samples[-1][1]:
                yield f"the memory of the {name} grows by {slope / (1 << 20):.1f} MiB a minute"

    def _processes(self) -> dict[str, int]:
        return {"front end": self.server.pid, "engine": self.server.engine_pid()}

    def _leaks(self) -> Iterator[str]:
        for name, pid in self._processes().items():
            now = Usage.of(pid)
            if now.exceeds(first := self.first.setdefault(name, now)):
                yield f"the {name} holds {now}, at first {first}"


def _slope(samples: list[tuple[float, int]]) -> float:
    """The median slope between any two of the last samples, robust against peaks right after a flood."""
    last = [sample for sample in samples if sample[0] >= samples[-1][0] - _JUDGED_SECONDS / 60]
    slopes = [(end[1] - start[1]) / (end[0] - start[0]) for start, end in combinations(last, 2)]
    return statistics.median(slopes) if slopes else 0.0
