"""Rounds of faults and calls; after each, the idle server's counters and resources are checked."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.chaos.attacks import ATTACKS
from benchmarks.chaos.clients import HonestClients
from benchmarks.chaos.fault_log import FaultLog, Notice
from benchmarks.chaos.faults import FAULTS, Arena
from benchmarks.chaos.usage import Life
from benchmarks.soak import reconcile
from benchmarks.soak.client_log import ClientLog
from benchmarks.soak.idle import use_full_capacity, wait_until_idle

_ROUND_SECONDS = 12.0
_MAX_FAULT_SECONDS = 8.0
_IN_FLIGHT = 12
_HEALTH_SECONDS = 0.5
_MAX_FAULTS = 3  # in a round


@dataclass(slots=True)
class ChaosReport:
    """What the clients saw and the checks found in all rounds."""

    rounds: int = 0
    calls: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    compared: int = 0
    uncertain: int = 0
    problems: list[str] = field(default_factory=list)  # of calls: lost or wrong
    leaks: list[str] = field(default_factory=list)
    lives: list[Life] = field(default_factory=list)

    def add(self, log: ClientLog, what: str) -> None:
        self.rounds += 1
        self.calls += log.calls
        self.refused += log.refused
        self.compared += log.compared
        self.uncertain += sum(log.uncertain_calls.values())
        self.problems += [f"{what}: {problem}" for problem in log.problems]


@dataclass(slots=True)
class Chaos:
    """Runs the rounds."""

    arena: Arena
    clients: HonestClients
    faults: FaultLog
    seed: int
    report: ChaosReport = field(default_factory=ChaosReport)

    async def run(self, seconds: float, kinds: Sequence[str]) -> None:
        """Run rounds for `seconds`; faults that end processes come last, so that one life shows memory growth."""
        started, draw = time.monotonic(), random.Random(self.seed)
        lasting = [kind for kind in kinds if not FAULTS[kind].ends_processes] or kinds
        deck: list[str] = []
        while (elapsed := time.monotonic() - started) < seconds:
            if len(deck) < _MAX_FAULTS:
                available = lasting if elapsed < seconds * 2 / 3 else kinds
                deck += draw.sample(available, len(available))
            chosen = [deck.pop(0) for _ in range(min(draw.randint(1, _MAX_FAULTS), len(deck)))]
            await self._round(_compatible(chosen), random.Random(draw.random()))

    async def _round(self, kinds: list[str], draw: random.Random) -> None:
        server, self.clients.log = self.arena.supervisor.server, ClientLog()
        print(f"round {self.report.rounds}: {', '.join(kinds)}", flush=True)
        before = reconcile.parse_metrics(await asyncio.to_thread(server.metrics))
        async with asyncio.TaskGroup() as group:
            health = group.create_task(self._watch_health())
            await asyncio.gather(
                self.clients.run(_ROUND_SECONDS, _IN_FLIGHT), *(self._apply(kind, draw) for kind in kinds)
            )
            health.cancel()
        await self._check(before, attacked=not ATTACKS.keys().isdisjoint(kinds))
        self.report.add(self.clients.log, f"round {self.report.rounds} ({', '.join(kinds)})")

    async def _apply(self, kind: str, draw: random.Random) -> None:
        """Apply a fault at a random moment, for a random time."""
        fault = FAULTS[kind]
        await asyncio.sleep(draw.uniform(0, _ROUND_SECONDS - _MAX_FAULT_SECONDS))
        with self.faults.record(kind, fault.notices):
            async with fault.apply(self.arena, draw):
                await asyncio.sleep(draw.uniform(1, _MAX_FAULT_SECONDS))

    async def _watch_health(self) -> None:
        while True:
            since = time.monotonic()
            healthy = await asyncio.to_thread(self.arena.supervisor.server.healthy)
            if not healthy and not self.faults.noticeable(Notice.HEALTH, since):
                self.report.problems.append(f"round {self.report.rounds}: /health was not 200 within 5 s")
            await asyncio.sleep(_HEALTH_SECONDS)

    async def _check(self, before: reconcile.MetricValues, *, attacked: bool) -> None:
        """Check that the idle server has counted what the clients saw and has released everything."""
        await self.arena.supervisor.wait_ready()
        server, log = self.arena.supervisor.server, self.clients.log
        after = await wait_until_idle(server, found := ClientLog())
        if self.report.lives and self.report.lives[-1].server is server:
            compare = reconcile.shortfalls if attacked else reconcile.discrepancies
            found.add_problems(compare(before, after, log))
        else:
            self.report.lives.append(Life(server))
        await use_full_capacity(self.clients.stub, self.clients.bounds, found)
        await wait_until_idle(server, found)
        found.add_problems(await self.report.lives[-1].check())
        self.report.leaks += [f"round {self.report.rounds}: {problem}" for problem in found.problems]


def _compatible(kinds: list[str]) -> list[str]:
    """The faults of `kinds` that go together: one that ends processes is combined with attacks only."""
    ending = [kind for kind in kinds if FAULTS[kind].ends_processes][:1]
    return [*ending, *(kind for kind in kinds if kind in ATTACKS)] if ending else kinds
