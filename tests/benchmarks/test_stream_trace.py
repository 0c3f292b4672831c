"""benchmarks.stream_trace: a whole server is traced, and each further token costs about the same calls."""

import json
import subprocess
import sys

import pytest
from repository import REPOSITORY


@pytest.mark.slow
def test_a_small_stream_is_traced() -> None:
    command = [sys.executable, "-m", "benchmarks.stream_trace", "-v"]
    done = subprocess.run(command, cwd=REPOSITORY, check=True, stdout=subprocess.PIPE, text=True)
    *lines, _, last = done.stdout.splitlines()
    report = json.loads(last)
    assert report["functions"] == len(lines) > report["files"] > 10
    assert report["calls_per_token"] > 10
    (detokenizer,) = [line for line in lines if line.endswith(" Detokenizer.add")]
    assert detokenizer.startswith("  1.00 calls per token")
