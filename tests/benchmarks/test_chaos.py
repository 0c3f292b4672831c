"""The chaos benchmark: calls made by hand are calls, which figures break a promise, and short attacks."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from harness import run_async, running_server
from repository import REPOSITORY

from benchmarks.chaos.attacks import ATTACKS
from benchmarks.chaos.http2 import connect
from benchmarks.chaos.promises import Figures, broken_promises, max_lag_ms
from demo.fake_model import make_fake_model

KEPT = Figures(
    "an attack",
    authenticated=False,
    client_timeout=10.0,
    answers=1,
    succeeded=99,
    failed={"UNAVAILABLE: overloaded": 1},
    slowest_probe_s=2.0,
    refused_after_s={"oversized message": 2.0},
    ended_after_s={"slow body": 15.0},
    lag_ms=250.0,
    descriptors=8300,
    memory_mib={"before": 100.0, "after": 200.0},
    exit_code=0,
)


@run_async
async def test_handmade_calls_are_calls(tmp_path: Path) -> None:
    model = make_fake_model(tmp_path / "model")
    with running_server(tmp_path, model, DEPLOYMENT_FRAMEWORK="fake", CACHE_DIR=tmp_path / "cache") as server:
        async with connect(server.grpc_port) as connection:
            for size in (0, 126, 127, 128, 5000):  # lengths of HPACK
                connection.metadata = (("x-correlation-id", "a" * size),)
                await connection.open_call("/fmaas.GenerationService/Generate", bytes(5))
            await connection.wait_ended()
            server.wait_for_metric('tgi_request_count{kind="batch"} 5.0')


def test_the_promises_hold_at_their_bounds() -> None:
    assert list(broken_promises(KEPT)) == []
    assert list(broken_promises(replace(KEPT, authenticated=True, succeeded=9))) == []


@pytest.mark.parametrize(
    ("figures", "broken"),
    [
        ({"answers": 0}, "no answer has reached the attackers"),
        ({"succeeded": 98}, "99.0% of honest calls succeeded, not 99%"),
        ({"wrong": 1}, "1 honest answers were wrong"),
        ({"slowest_probe_s": 2.1}, "a probe took 2.1 s, not 2"),
        ({"refused_after_s": {"oversized body": 2.1}}, "oversized body: refused after 2.1 s, not 2"),
        ({"ended_after_s": {"slow body": 15.1}}, "slow body: ended after 15.1 s, CLIENT_TIMEOUT_SECONDS is 10.0"),
        ({"lag_ms": 332.5}, "the event loop was held for 332 ms, not 250"),
        ({"descriptors": 10_001}, "the front end had 10001 open files, not 10000"),
        ({"memory_mib": {"before": 100.0, "after": 201.0}}, "the front end kept 101 MiB, not 100"),
        ({"lost_streams": 1}, "the drain lost 1 streams"),
        ({"exit_code": None}, "the server ended with exit code None"),
    ],
)
def test_each_promise_can_break(figures: dict[str, object], broken: str) -> None:
    assert list(broken_promises(replace(KEPT, **figures))) == [broken]  # type: ignore[arg-type]


def test_lag_is_that_of_the_slowest_callback_between_two_scrapes() -> None:
    name = "tgi_event_loop_lag_duration_bucket"
    before: dict[tuple[str, ...], float] = {(name, "0.1"): 5.0, (name, "0.15"): 5.0, (name, "+Inf"): 6.0}
    after: dict[tuple[str, ...], float] = {(name, "0.1"): 8.0, (name, "0.15"): 9.0, (name, "+Inf"): 10.0}
    assert max_lag_ms(before, after) == pytest.approx(150)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_short_attacks_break_no_promise() -> None:
    command = [sys.executable, "-m", "benchmarks.chaos", "--seconds", "5"]
    done = subprocess.run(command, cwd=REPOSITORY, check=False, stdout=subprocess.PIPE, text=True)
    reports = [json.loads(line) for line in done.stdout.splitlines()[-len(ATTACKS) :]]
    assert {report["attack"]: report["broken"] for report in reports} == {name: [] for name in ATTACKS}
    assert done.returncode == 0
