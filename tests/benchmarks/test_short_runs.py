"""Benchmarks that take part in `make test-all`: a few pauses, interrupted starts, restarts, and one traced stream."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
from repository import REPOSITORY

from benchmarks import interrupted_starts, rolling_restarts, stopped_processes

pytestmark = pytest.mark.slow


def test_a_few_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopped_processes, "HEALTH_SECONDS", 15.0)  # on a busy machine
    assert stopped_processes.main(["--pauses", "6", "--servers", "3"]) == 0


def test_a_few_interrupted_starts(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupted_starts, "EXIT_SECONDS", 15.0)
    assert interrupted_starts.main(["--starts", "8", "--cache", str(cache_dir)]) == 0


def test_in_a_rollout_no_call_is_lost_and_no_stream_is_broken() -> None:
    assert asyncio.run(rolling_restarts.main(4))


def test_a_small_stream_is_traced() -> None:
    command = [sys.executable, "-m", "benchmarks.stream_trace", "-v"]
    done = subprocess.run(command, cwd=REPOSITORY, check=True, stdout=subprocess.PIPE, text=True)
    *lines, _, last = done.stdout.splitlines()
    report = json.loads(last)
    assert report["functions"] == len(lines) > report["files"] > 10
    assert report["calls_per_token"] > 10
    (detokenizer,) = [line for line in lines if line.endswith(" Detokenizer.add")]
    assert detokenizer.startswith("  1.00 calls per token")
