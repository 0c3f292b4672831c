"""The parts of the chaos soak: what the faults do, and who may notice; and two minutes of it in `make test-all`."""

import errno
import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import run_async, running_server
from repository import REPOSITORY

from benchmarks.chaos import fault_log
from benchmarks.chaos.attacks import ATTACKS, attack_until
from benchmarks.chaos.fault_log import FaultLog, Notice
from benchmarks.chaos.files import AdapterFiles
from benchmarks.chaos.http2 import Target, connect, reached
from benchmarks.chaos.http_attacks import HTTP_ATTACKS
from benchmarks.chaos.shim import Control, Shim
from benchmarks.chaos.usage import Life, Usage
from demo.fake_model import make_fake_model


def test_only_who_may_notice_a_fault_is_excused(monkeypatch: pytest.MonkeyPatch) -> None:
    log, before = FaultLog(), time.monotonic()
    assert not log.noticeable(Notice.HEALTH, before)
    with log.record("pause", frozenset({Notice.HEALTH})), log.record("another", frozenset()):
        assert log.noticeable(Notice.HEALTH, before)
        assert not log.noticeable(Notice.CALLS, before)
    assert log.noticeable(Notice.HEALTH, before)  # it was during the call
    assert not log.noticeable(Notice.HEALTH, time.monotonic() + 2 * fault_log._AFTERMATH_SECONDS)
    assert log.counts == {"pause": 1, "another": 1}


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_the_clock_is_stepped_and_the_disk_of_the_log_is_full(tmp_path: Path) -> None:
    shim = Shim(tmp_path)

    def python(code: str) -> "subprocess.CompletedProcess[str]":
        command, environment = [sys.executable, "-c", f"import os, sys, time\n{code}"], os.environ | shim.environment
        return subprocess.run(command, env=environment, check=False, capture_output=True, text=True)

    for offset in (0, 86400, -3600):
        shim.set(Control.CLOCK_OFFSET, offset)
        for clock in ("time.time()", "time.clock_gettime(time.CLOCK_REALTIME)"):
            assert abs(float(python(f"print({clock})").stdout) - time.time() - offset) < 60
        assert abs(float(python("print(time.monotonic())").stdout) - time.monotonic()) < 60
    write = "try: os.write(1, b'a')\nexcept OSError as error: sys.exit(error.errno)"
    assert (python(write).returncode, python(write).stdout) == (0, "a")
    shim.set(Control.LOG_FULL, 1)
    assert (python(write).returncode, python(write).stdout) == (errno.ENOSPC, "")


def test_versions_of_an_adapter_during_a_call(tmp_path: Path, glassllm_dir: Path) -> None:
    files = AdapterFiles(tmp_path, glassllm_dir)
    assert files.versions_since(0.0) == {"a"}
    files.use("b")
    began = time.monotonic()
    assert files.versions_since(began) == {"b"}
    files.damage(random.Random(0))
    files.use("a")
    assert files.versions_since(began) == {"b", "c", "a"}
    assert files.versions_since(time.monotonic()) == {"a"}


def test_leaks_and_growing_memory_are_found() -> None:
    assert Usage(100, 40).exceeds(Usage(10, 40))
    assert Usage(10, 100).exceeds(Usage(10, 40))
    assert not Usage(12, 42).exceeds(Usage(10, 40))
    samples = {"level": [(minute, 100 << 20) for minute in range(20)]}
    samples["grows"] = [(minute, (100 + 2 * minute) << 20) for minute in range(20)]
    life = Life(server=None, memory=samples)  # type: ignore[arg-type]  # it asks no process
    assert list(life.growth()) == ["the memory of the grows grows by 2.0 MiB a minute"]


@run_async
async def test_handmade_calls_are_calls(tmp_path: Path) -> None:
    model = make_fake_model(tmp_path / "model")
    with running_server(tmp_path, model, DEPLOYMENT_FRAMEWORK="fake", CACHE_DIR=tmp_path / "cache") as server:
        target = Target(server.grpc_port, server.http_port)
        async with connect(target) as connection:
            for size in (0, 126, 127, 128, 5000):  # lengths of HPACK
                connection.metadata = (("x-correlation-id", "a" * size),)
                await connection.open_call("/fmaas.GenerationService/Generate", bytes(5))
            server.wait_for_metric('tgi_request_count{kind="batch"} 5.0')
        for name in ATTACKS:
            await attack_until(name, target, 0.05, random.Random(0))
            while name in HTTP_ATTACKS and not reached[name]:  # others have calls that take seconds
                await attack_until(name, target, 0.5, random.Random(0))
        assert server.get("/health", timeout=60) == (200, "")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_minutes_of_chaos(glassllm_dir: Path, cache_dir: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.chaos", "--cache", str(cache_dir), "--minutes", "2"]
    done = subprocess.run(command, cwd=REPOSITORY, check=False, stdout=subprocess.PIPE, text=True)
    report = json.loads(done.stdout.splitlines()[-1])
    assert (report["problems"], report["leaks"], done.returncode) == ([], [], 0)
    assert report["compared"] > 100
