"""Pauses and interrupted starts: what they count as a problem, and a few real ones in `make test-all`."""

from pathlib import Path

import pytest

from benchmarks import interrupted_starts, stopped_processes


@pytest.mark.slow
def test_a_few_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopped_processes, "HEALTH_SECONDS", 15.0)  # on a busy machine
    assert stopped_processes.main(["--pauses", "6", "--servers", "3"]) == 0


@pytest.mark.slow
def test_a_few_interrupted_starts(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupted_starts, "EXIT_SECONDS", 15.0)
    assert interrupted_starts.main(["--starts", "8", "--cache", str(cache_dir)]) == 0
