"""The parts of the chaos soak: what the faults do; and two minutes of it in `make test-all`."""

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

from benchmarks.chaos.attacks import ATTACKS, attack_until
from benchmarks.chaos.http2 import Target, connect, reached
from benchmarks.chaos.http_attacks import HTTP_ATTACKS
from benchmarks.chaos.shim import Control, Shim
from demo.fake_model import make_fake_model


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
