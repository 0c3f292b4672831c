"""Pauses and interrupted starts: what they count as a problem, and a few real ones in `make test-all`."""

import signal
from pathlib import Path

import pytest

from benchmarks import interrupted_starts, stopped_processes
from benchmarks.interrupted_starts import Start


def start(
    *, handled: bool = True, code: int = 0, duration: float = 0.1, left_behind: float = 0.0, output: str = ""
) -> Start:
    return Start("fake", 0.5, handled, code, duration, 0.1, left_behind, output)


@pytest.mark.parametrize(
    ("interrupted", "problem"),
    [
        (start(code=1), "exit code 1"),
        (start(code=-signal.SIGTERM), "exit code -15"),
        (start(code=-signal.SIGSEGV, handled=False), "exit code -11"),
        (start(duration=1.2), "ended after 1.2 s, 0.1 s of CPU time"),
        (start(left_behind=3.0), "a process was there 3.0 s later"),
        (start(output="INFO fine\nTraceback (most recent call last):\n"), "it said:"),
    ],
)
def test_what_is_wrong_with_the_end_of_a_start(interrupted: Start, problem: str) -> None:
    (found,) = interrupted.problems()
    assert problem in found


@pytest.mark.parametrize("interrupted", [start(), start(code=-signal.SIGTERM, handled=False), start(output="INFO ok")])
def test_what_is_right(interrupted: Start) -> None:
    assert interrupted.problems() == []


@pytest.mark.slow
def test_a_few_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopped_processes, "HEALTH_SECONDS", 15.0)  # on a busy machine
    assert stopped_processes.main(["--pauses", "6", "--servers", "3"]) == 0


@pytest.mark.slow
def test_a_few_interrupted_starts(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupted_starts, "EXIT_SECONDS", 15.0)
    assert interrupted_starts.main(["--starts", "8", "--cache", str(cache_dir)]) == 0
