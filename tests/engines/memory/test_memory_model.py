"""Where the weights of steps come from at a start: modes, margin, and what is kept for the next one."""

import errno
import importlib.metadata
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from batches import engine_options
from synthetic import MemoryFormula, MiB, SyntheticEngine

from tgis.batcher.memory_model import MemoryModel
from tgis.engines.memory import available, profiler
from tgis.engines.padded.kv_cache import KvCacheCost
from tgis.errors import StartError
from tgis.ipc.messages import EngineOptions

FREE = 8 << 30
CPU = torch.device("cpu")
KV = KvCacheCost(60_000.0, 10 * MiB)

Start = Callable[..., tuple[MemoryModel, SyntheticEngine]]


@pytest.fixture
def options(tmp_path: Path) -> EngineOptions:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"0" * 10)
    wanted = {"estimate_memory": "auto", "cache_dir": str(tmp_path / "cache"), "max_sequence_length": 2048}
    return msgspec.structs.replace(engine_options(model, 64, None), **wanted)


@pytest.fixture
def start(options: EngineOptions, monkeypatch: pytest.MonkeyPatch) -> Start:
    """A start of a synthetic engine on a system with `limit` bytes, with some facts and options changed."""

    def run(*, limit: int = 2 * FREE, facts: dict[str, Any] | None = None, **changes: Any) -> Any:
        wanted: dict[str, Any] = {"formula": MemoryFormula(token=1000), "capacity": FREE} | (facts or {})
        engine = SyntheticEngine(**wanted)
        monkeypatch.setattr(available, "available_memory", lambda _: FREE)
        monkeypatch.setattr(profiler, "total_memory", lambda _: limit)
        monkeypatch.setattr(profiler, "peak_meter", lambda _: engine)
        found = profiler.profile_padded(engine, msgspec.structs.replace(options, **changes), CPU, KV, engine.held)
        return found, engine

    return run


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_the_margin_is_taken_off_once(start: Start) -> None:
    whole, _ = start(batch_safety_margin=0)
    less, engine = start(batch_safety_margin=25)
    assert whole.token_capacity - less.token_capacity == pytest.approx(FREE / 4 / 61_000, abs=1)
    assert not engine.steps  # the margin is no reason to measure again
    worst_step = 30 * MiB + 64 * MiB
    assert less.token_capacity == int((0.75 * FREE - KV.fixed_bytes - worst_step) / 61_000)
    assert less.prefill_linear == 1.0


def test_logits_with_facts_count_on_a_cpu_even_if_they_are_not_seen(start: Start) -> None:
    silent = {"formula": MemoryFormula(token=1000), "vocab_size": 50_000}
    seen, _ = start(facts=silent | {"device": "cuda:0"})
    known, _ = start(facts=silent | {"device": "cpu"})
    worst_pass = 3 * 512 * 50_000 * 4  # of three copies of all scores, in float32
    room = int((0.8 * FREE - KV.fixed_bytes - worst_pass) / 61_000)
    assert known.token_capacity == pytest.approx(room, abs=1)
    assert known.token_capacity < seen.token_capacity


def test_prefills_of_whole_inputs_weigh_by_the_square(start: Start) -> None:
    found, _ = start(facts={"encoder_decoder": True, "formula": MemoryFormula(token=1000, square=610.0)})
    assert found.prefill_quadratic == pytest.approx(0.01, rel=0.01)  # of a token, which is 61,000 bytes
    assert found.prefill_linear == 1.0


def test_off_runs_nothing_and_counts_keys_and_values(start: Start) -> None:
    found, engine = start(estimate_memory="off")
    assert not engine.steps
    assert found.token_capacity == int((0.8 * FREE - KV.fixed_bytes) / KV.bytes_per_token)


def test_manual_runs_nothing_and_trusts(start: Start) -> None:
    found, engine = start(estimate_memory="manual")
    assert not engine.steps
    assert found == profiler.declared_memory(2048, 64, 20)


def test_the_next_start_measures_nothing(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    first, engine = start()
    assert engine.steps
    again, engine = start()
    assert not engine.steps
    assert again == first
    assert "memory was measured at an earlier start" in caplog.text
    assert warnings(caplog) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"max_sequence_length": 1024},
        {"threads": 1},
        {"shards": 2},
        {"limit": FREE},
        {"facts": {"dtype": "float16"}},
        {"facts": {"device": "cuda:0"}},
        {"facts": {"max_batch_size": 32}},
    ],
    ids=str,
)
def test_other_circumstances_are_another_measurement(start: Start, changes: dict[str, Any]) -> None:
    start()
    assert start(**changes)[1].steps


def test_another_model_is_another_measurement(start: Start, options: EngineOptions) -> None:
    start()
    weights = Path(options.model_path) / "model.safetensors"
    times = weights.stat()
    weights.write_bytes(b"1" * 10)
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns + 1))
    assert start()[1].steps


@pytest.mark.parametrize("library", ["torch", "transformers"])
def test_another_library_is_another_measurement(start: Start, monkeypatch: pytest.MonkeyPatch, library: str) -> None:
    start()
    true = importlib.metadata.version
    changed = lambda name: "0.1" if name == library else true(name)  # noqa: E731
    monkeypatch.setattr(importlib.metadata, "version", changed)
    assert start()[1].steps


def kept_file(tmp_path: Path) -> Path:
    (file,) = (tmp_path / "cache" / "memory").iterdir()
    return file


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.write_bytes(b""),
        lambda file: file.write_bytes(file.read_bytes()[:-20]),
        lambda file: file.write_bytes(b"\x80" * 100),
        lambda file: file.write_bytes(b" " * (2 << 20) + file.read_bytes()),
        lambda file: file.write_text(file.read_text().replace('"costs"', '"more": 1, "costs"')),
        lambda file: file.write_text(file.read_text().replace('"reserve": ', '"reserve": -')),
        lambda file: file.write_text(file.read_text().replace('"reserve": ', '"reserve": 1e999, "x": ')),
        lambda file: file.write_text(file.read_text().replace('"float32"', '"float16"').replace('"none"', '"cpu"')),
    ],
)
def test_a_damaged_file_is_one_line_and_another_measurement(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], object]
) -> None:
    first, _ = start()
    damage(kept_file(tmp_path))
    again, engine = start()
    assert engine.steps
    assert again == first
    (line,) = warnings(caplog)
    assert str(kept_file(tmp_path)) in line
    assert not start()[1].steps  # it has been replaced


def test_a_place_that_cannot_be_written_is_one_line(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "replace", refuse)
    assert start()[1].steps
    (line,) = warnings(caplog)
    assert "cannot be kept, memory will be measured at the next start too: [Errno 30] Read-only file system" in line
    assert [*(tmp_path / "cache" / "memory").iterdir()] == []


def test_a_file_where_a_directory_should_be_is_tolerated(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "memory").touch()
    assert start()[1].steps
    (line,) = warnings(caplog)
    assert "cannot be kept" in line


def test_a_system_that_tells_nothing_is_as_off(
    start: Start, options: EngineOptions, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected, engine = start(estimate_memory="off")

    def refuse(_: torch.device) -> object:
        raise PermissionError("no clear_refs")

    monkeypatch.setattr(profiler, "peak_meter", refuse)
    assert profiler.profile_padded(engine, options, CPU, KV, engine.held).token_capacity == expected.token_capacity
    assert warnings(caplog) == ["memory cannot be measured here, ESTIMATE_MEMORY is off then: no clear_refs"]


def test_no_room_at_all_stops_the_start_and_says_what_to_lower(start: Start) -> None:
    with pytest.raises(StartError, match=r"0 bytes are there .* 64 rows take 10 MiB.*; lower MAX_BATCH_SIZE, choose a"):
        start(estimate_memory="off", batch_safety_margin=100)


def test_blocks_get_what_the_worst_step_leaves(
    start: Start, options: EngineOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(estimate_memory="off")  # for the system
    engine = SyntheticEngine(MemoryFormula(token=1000), block_size=16)
    monkeypatch.setattr(profiler, "peak_meter", lambda _: engine)
    taken = profiler.profile_paged(engine, options, CPU, 1000, engine.held)
    assert taken == pytest.approx(30 * MiB + 64 * MiB + 1000 * 2048, rel=0.01)


def test_ranks_measure_together_if_one_of_them_must(start: Start, options: EngineOptions) -> None:
    start(estimate_memory="off")
    engine = SyntheticEngine(MemoryFormula(), block_size=16)
    profiler.profile_paged(engine, options, CPU, 1000, engine.held)
    steps, asked = engine.steps, []

    def smallest(value: int) -> int:
        asked.append(value)
        return 0

    profiler.profile_paged(engine, options, CPU, 1000, engine.held, smallest)
    assert asked == [True]
    assert engine.steps == 2 * steps
