"""What a start takes from an earlier one, and what it measures anew."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import engine_options

from tgis.engines.memory import past_starts
from tgis.engines.memory.past_starts import recall

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class Starts:
    """Starts of a model; the number of the start is what it would measure."""

    def __init__(self, directory: Path) -> None:
        self.model = directory / "model"
        self.model.mkdir()
        (self.model / "model.safetensors").write_text("weights")
        (self.model / os.fsdecode(b"r\xe9sum\xe9.md")).touch()  # a name that is not UTF-8
        self.cache = directory / "cache"
        self.cache.mkdir()
        self.num_starts = 0

    def __call__(self, device: torch.device = CPU, **options: Any) -> int:
        self.num_starts += 1
        given = {"cache_dir": str(self.cache), "verify_start": False} | options
        made = engine_options(self.model, 4, **given)
        return recall(made, device, lambda: self.num_starts)

    @property
    def files(self) -> list[Path]:
        return sorted((self.cache / "starts").iterdir())


@pytest.fixture
def start(tmp_path: Path) -> Starts:
    return Starts(tmp_path)


def other_weights(starts: Starts) -> None:
    (starts.model / "model.safetensors").write_text("other weights")


def other_time(starts: Starts) -> None:
    os.utime(starts.model / "model.safetensors", (1, 1))


def damage(starts: Starts) -> None:
    for file in starts.files:
        file.write_text('{"x"')


def foreign(starts: Starts) -> None:
    for file in starts.files:
        file.write_text('"1"')


@pytest.mark.parametrize("change", [other_weights, other_time, damage, foreign])
def test_what_it_depends_on_has_changed(start: Starts, change: Callable[[Starts], None]) -> None:
    assert [start(), start()] == [1, 1]
    change(start)
    assert [start(), start()] == [3, 3]


@pytest.mark.parametrize(
    "options", [{"max_sequence_length": 99}, {"num_threads": 2}, {"dtype": "bfloat16"}, {"cpu_isa": "another"}]
)
def test_options_have_changed(start: Starts, options: dict[str, Any]) -> None:
    assert [start(), start(**options), start(), start(**options)] == [1, 2, 1, 2]


def test_the_machine_has_changed(start: Starts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert start() == 1
    monkeypatch.setattr(past_starts, "total_memory", lambda _device: 1 << 30)
    assert [start(), start()] == [2, 2]
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nflags\t\t: avx2\ncpu MHz\t\t: 2000\n")
    monkeypatch.setattr(past_starts, "_CPUINFO", cpuinfo)
    assert start() == 4
    cpuinfo.write_text("processor\t: 1\nflags\t\t: avx2\ncpu MHz\t\t: 2001\n")
    assert start() == 4
    cpuinfo.write_text("processor\t: 0\nflags\t\t: avx512f\ncpu MHz\t\t: 2000\n")
    assert start() == 6
    monkeypatch.setattr(past_starts, "version", lambda _name: "99")
    assert start() == 7


@pytest.mark.parametrize("options", [{"device": CUDA}, {"verify_start": True}, {"num_shards": 2}, {"cache_dir": ""}])
def test_measured_each_time(start: Starts, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(past_starts, "total_memory", lambda _device: 1 << 30)
    assert [start(**options), start(**options)] == [1, 2]


def test_a_cache_that_cannot_be_written(start: Starts, caplog: pytest.LogCaptureFixture) -> None:
    start.cache.rmdir()
    assert [start(), start()] == [1, 2]
    assert "the next start measures again" in caplog.text


def test_few_files_are_kept(start: Starts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(past_starts, "_MAX_FILES", 3)
    for length in range(10, 15):
        start(max_sequence_length=length)
    assert len(start.files) == 3
    assert start(max_sequence_length=14) == 5
    assert start(max_sequence_length=10) == 7
