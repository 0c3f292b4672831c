"""tgis.frontend.engine_process: what the watchdog counts, with a made-up clock, and kills."""

import asyncio
import random
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from batches import engine_options
from engine_clients import INFO
from harness import run_async

from tgis.frontend import engine_process
from tgis.frontend.engine_process import HEARTBEAT_TIMEOUT, TICK_SECONDS, EngineProcess, EngineWatchdog
from tgis.ipc.messages import Ready

EPSILON = 1e-6


@pytest.mark.parametrize("seed", range(10))
def test_only_time_in_which_the_front_end_runs_counts(seed: int) -> None:
    """No hang is missed and no pause counts as one, but for the one tick that a pause may be taken for."""
    draw, now, watchdog = random.Random(seed), 1000.0, EngineWatchdog(1000.0)
    since_step, since_heartbeat = [0.0, 0], [0.0, 0]  # seconds that the front end has run, and its pauses
    for _ in range(2000):
        paused = draw.random() < 0.1  # the front end; the engine may be, too
        seconds = draw.uniform(0.1, 30) if paused else draw.uniform(0, TICK_SECONDS)
        now += seconds
        for since in (since_step, since_heartbeat):
            since[paused] += 1 if paused else seconds
        if draw.random() < 0.9:  # else what is unread comes before the tick that is due
            watchdog.tick(now)
        if draw.random() < 0.02:
            watchdog.progress(now)
            since_step = [0.0, 0]
        if draw.random() < 0.1:
            watchdog.heartbeat(0, now)
            since_heartbeat = [0.0, 0]
        watchdog.tick(now)
        least, pauses = since_step
        assert least - EPSILON <= watchdog.seconds_stalled(now) <= least + TICK_SECONDS * pauses + EPSILON
        least, pauses = since_heartbeat
        if least > HEARTBEAT_TIMEOUT + EPSILON:
            assert watchdog.silence(now) is not None
        if least + TICK_SECONDS * pauses <= HEARTBEAT_TIMEOUT - EPSILON:
            assert watchdog.silence(now) is None


def test_any_rank_may_be_silent() -> None:
    watchdog, now = EngineWatchdog(100.0), 100.0
    assert watchdog.silence(now) is None
    for _ in range(19):
        assert watchdog.tick(now) == 0
        for rank in (0, 1, 2) if now < 103 else (0, 2):
            watchdog.heartbeat(rank, now)
        now += TICK_SECONDS
    assert watchdog.silence(now) == "no heartbeat of rank 1 of the engine for 7 s"
    watchdog.heartbeat(1, now)
    assert watchdog.silence(now) is None
    assert watchdog.tick(now + 9) == 9


ENGINE = """
import socket, sys, time
assert sys.argv[1:3] == ["-m", "tgis.engine_core.main"]
with socket.socket(fileno=int(sys.argv[3])) as sock:
    while b"shutdown" not in sock.recv(100_000):
        pass"""
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
    assert client.death_cause == "a test"


@pytest.mark.parametrize(
    ("ready", "at_once", "code"), [(True, False, 0), (True, True, -9), (False, False, -9), (None, False, -9)]
)
@run_async
async def test_an_engine_process_is_asked_to_end_and_killed_if_it_does_not(
    ready: bool | None, at_once: bool, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that ends after its second message, or with `ready` None never."""
    script = tmp_path / "engine"
    script.write_text(f"#!{sys.executable}\n{ENGINE}" + ("\ntime.sleep(1000)" if ready is None else ""))
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.setattr(engine_process, "_EXIT_TIMEOUT", 0.01 if ready is None else 60)
    process = EngineProcess()
    await process.stop()  # nothing to stop
    assert await process.start(engine_options(tmp_path)) > 0
    assert process.exit_code is None
    if ready is not False:
        process.handle(Ready(INFO, "why"))
    await process.stop(at_once=at_once)
    facts: tuple[object, object] = process.exit_code, process.fallback_reason
    assert facts == (code, "" if ready is False else "why")
    reason = "the server has stopped" if code else "the engine process ended with exit code 0"
    assert await process.died == reason
    assert process._transport is not None
    assert process._transport.is_closing()


@run_async
async def test_a_kill_may_come_after_the_end_that_asyncio_has_not_noticed_yet() -> None:
    client = EngineProcess()
    with subprocess.Popen(["true"], process_group=0) as process:
        process.wait()
    client._process = SimpleNamespace(pid=process.pid, returncode=None)  # type: ignore[assignment]
    client.kill("a test")
