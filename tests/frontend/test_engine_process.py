"""tgis.frontend.engine_process: kills, and thousands of pauses of either process or both, with a made-up clock."""

import asyncio
import math
import random
import signal
import subprocess
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from harness import run_async

from tgis.frontend.engine_process import HEARTBEAT_TIMEOUT, TICK_SECONDS, EngineProcess, EngineWatchdog

HEARTBEAT_SECONDS = 1.0
STEP_TIMEOUT = 120.0
PAUSE_WEIGHT = 0.5  # seconds that a pause of the front end may count for at most
EPSILON = 1e-6


class Simulation:
    """A front end and a busy engine process. Both have timers that are late if they are due in a pause."""

    def __init__(self, draw: random.Random, step_seconds: Callable[[], float]) -> None:
        self.now = 0.0
        self.front_time = 0.0  # that the front end has run for
        self.both_since = 0.0  # when both have run since, if they do
        self.alone_since = math.inf  # when only the front end has run since, if it does
        self.num_pauses = 0  # of the front end
        self.kills = 0
        self.off = 0  # ticks with health off
        self.watchdog = EngineWatchdog(0.0)
        self._draw, self._step_seconds = draw, step_seconds
        self._next_tick = self._next_heartbeat = 0.0
        self._step_left = step_seconds()  # of the engine's own time
        self._unread: list[Callable[[], None]] = []
        self._progress = self._heartbeat = (0.0, 0)  # the front end's time and pauses until then
        self._front_runs = True

    def run(self, seconds: float, *, front: bool, engine: bool) -> None:
        """Let time pass, for those that run."""
        self._switch(front, engine)
        end = self.now + seconds
        while True:
            due = [(self._next_tick, self._tick)] if front else []
            due += [(self._next_heartbeat, self._beat), (self.now + self._step_left, self._end_step)] if engine else []
            at, event = min(due, key=lambda each: each[0], default=(math.inf, self._tick))
            elapsed = min(max(at, self.now), end) - self.now
            self.now += elapsed
            self.front_time += elapsed * front
            self._step_left -= elapsed * engine
            if at >= end:
                return
            event()

    def _switch(self, front: bool, engine: bool) -> None:
        if front and not self._front_runs:
            self.num_pauses += 1
            if self._draw.random() < 0.5:  # the timer may be first
                self._next_tick = self.now
                self._tick()
            for read in self._unread:
                read()
            self._unread.clear()
        self._front_runs = front
        self.both_since = self.now if front and engine else math.inf
        self.alone_since = self.now if front and not engine else math.inf

    def _send(self, read: Callable[[], None]) -> None:
        if self._front_runs:
            read()
        else:
            self._unread.append(read)

    def _beat(self) -> None:
        self._send(self._read_heartbeat)
        self._next_heartbeat = self.now + HEARTBEAT_SECONDS

    def _end_step(self) -> None:
        self._send(self._read_step)
        self._step_left = self._step_seconds()

    def _read_heartbeat(self) -> None:
        self.watchdog.heartbeat(0, self.now)
        self._heartbeat = self.front_time, self.num_pauses

    def _read_step(self) -> None:
        self.watchdog.progress(self.now)
        self._progress = self.front_time, self.num_pauses

    def _tick(self) -> None:
        self.watchdog.tick(self.now)
        self._next_tick = self.now + TICK_SECONDS
        least, most = self._bounds(self._progress)
        stalled = self.watchdog.seconds_stalled(self.now)
        assert least <= stalled <= most  # no hang is missed, and no pause counts as one
        self.kills += stalled > STEP_TIMEOUT
        least, most = self._bounds(self._heartbeat)
        off = self.watchdog.silence(self.now) is not None
        assert off if least > HEARTBEAT_TIMEOUT else not off or most > HEARTBEAT_TIMEOUT
        self.off += off
        if self.now - self.alone_since > HEARTBEAT_TIMEOUT + TICK_SECONDS:
            assert off
        if self.now - self.both_since > HEARTBEAT_SECONDS + TICK_SECONDS:
            assert not off

    def _bounds(self, since: tuple[float, int]) -> tuple[float, float]:
        """What the watchdog may have counted since then."""
        front_time, num_pauses = since
        least = self.front_time - front_time
        return least - EPSILON, least + PAUSE_WEIGHT * (self.num_pauses - num_pauses) + EPSILON


def pause_both(simulation: Simulation, seconds: float, draw: random.Random) -> None:
    """One of them stops, and one goes on, a moment before the other."""
    first, last = draw.random() < 0.5, draw.random() < 0.5
    simulation.run(draw.uniform(0, 0.5), front=first, engine=not first)
    simulation.run(seconds, front=False, engine=False)
    simulation.run(draw.uniform(0, 0.5), front=last, engine=not last)


@pytest.mark.parametrize(("of_engine", "longest_step"), [(False, 80), (True, 2)])
def test_pauses_kill_nothing_and_those_of_the_engine_alone_turn_health_off(of_engine: bool, longest_step: int) -> None:
    """Though many of the front end or of both fall into one long step."""
    draw = random.Random(longest_step)
    simulation = Simulation(draw, lambda: draw.uniform(0, longest_step))
    for _ in range(5000):
        simulation.run(draw.uniform(1, 6), front=True, engine=True)
        if draw.random() < 0.5:
            simulation.run(draw.uniform(0.1, 30), front=of_engine, engine=not of_engine)
        else:
            pause_both(simulation, draw.uniform(0.1, 30), draw)
    assert simulation.kills == 0
    assert (simulation.off > 0) == of_engine


@pytest.mark.parametrize("seed", range(20))
def test_a_hang_is_found_amid_pauses(seed: int) -> None:
    """The engine process still sends heartbeats while its steps hang."""
    draw = random.Random(seed)
    steps = iter([1.0] * draw.randrange(50))
    simulation = Simulation(draw, lambda: next(steps, math.inf))
    while not simulation.kills:
        simulation.run(draw.uniform(1, 6), front=True, engine=True)
        pause_both(simulation, draw.uniform(0.1, 30), draw)
    assert simulation.front_time > STEP_TIMEOUT / 2  # the rest may be pauses
    assert simulation.front_time < 50 + STEP_TIMEOUT + 10


def test_any_rank_may_be_silent() -> None:
    watchdog = EngineWatchdog(100.0)
    now = 100.0
    for _ in range(19):
        watchdog.tick(now)
        watchdog.heartbeat(0, now)
        watchdog.heartbeat(2, now)
        if now < 103:
            watchdog.heartbeat(1, now)
        now += TICK_SECONDS
    assert watchdog.silence(now) == "no heartbeat of rank 1 of the engine for 7 s"
    watchdog.heartbeat(1, now)
    assert watchdog.silence(now) is None


ENGINE_WITH_COMPILER = "sleep 1000 & echo started; wait"


@run_async
async def test_a_kill_ends_what_the_engine_process_has_started() -> None:
    client = EngineProcess()
    client._process = process = await asyncio.create_subprocess_exec(
        "sh", "-c", ENGINE_WITH_COMPILER, stdout=asyncio.subprocess.PIPE, process_group=0
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"started\n"
    client.kill("a test")
    assert await process.wait() == -signal.SIGKILL
    assert await process.stdout.read() == b""  # once nobody is left who has the writing end open
    client.kill("again")


@run_async
async def test_a_kill_may_come_after_the_end_that_asyncio_has_not_noticed_yet() -> None:
    client = EngineProcess()
    with subprocess.Popen(["true"], process_group=0) as process:
        process.wait()
    client._process = SimpleNamespace(pid=process.pid, returncode=None)  # type: ignore[assignment]
    client.kill("a test")
