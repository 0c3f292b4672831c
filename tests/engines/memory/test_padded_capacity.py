"""The capacity that the modes of ESTIMATE_MEMORY find at the start."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from batches import engine_options
from synthetic_engine import MemoryFormula, MiB, SyntheticEngine
from tiny_models import tgis_warnings

from tgis.engines.memory import available, profiler
from tgis.engines.memory.capacity import KVCacheCost, manual_capacity, padded_capacity
from tgis.errors import StartError
from tgis.ipc.messages import EngineOptions

FREE = 8 << 30
CPU = torch.device("cpu")
COST = KVCacheCost(60_000.0, 10 * MiB)
FULL_BATCH = 30 * MiB + 64 * MiB  # of the synthetic engine

Start = Callable[..., tuple[int, SyntheticEngine]]


@pytest.fixture
def options() -> EngineOptions:
    changes = {"estimate_memory": "auto", "max_sequence_length": 2048}
    return engine_options(Path("model"), 64, **changes)


@pytest.fixture
def start(options: EngineOptions, monkeypatch: pytest.MonkeyPatch) -> Start:
    """The token capacity of a synthetic engine on a system with `FREE` bytes, with some facts and options changed."""

    def run(*, facts: dict[str, Any] | None = None, **changes: Any) -> tuple[int, SyntheticEngine]:
        wanted: dict[str, Any] = {"formula": MemoryFormula(), "capacity": FREE} | (facts or {})
        engine = SyntheticEngine(**wanted)
        monkeypatch.setattr(available, "available_memory", lambda _: FREE)
        monkeypatch.setattr(profiler, "PeakMeter", lambda _: engine)
        changed = msgspec.structs.replace(options, **changes)
        return capacity(engine, changed), engine

    return run


def capacity(engine: SyntheticEngine, options: EngineOptions) -> int:
    measure = partial(profiler.profile, engine, options, CPU)
    return padded_capacity(options, 64, COST, available.memory_for_batches(options, CPU), measure)


def test_the_margin_is_taken_off_once(start: Start) -> None:
    whole, _ = start(batch_safety_margin=0)
    less, _ = start(batch_safety_margin=25)
    assert whole - less == pytest.approx(FREE / 4 / 60_000, abs=1)
    assert less == int((0.75 * FREE - COST.fixed_bytes - FULL_BATCH) / 60_000)


def test_logits_of_prompts_count_on_a_cpu_even_if_they_are_not_seen(start: Start) -> None:
    facts = {"formula": MemoryFormula(), "vocab_size": 50_000}
    seen, _ = start(facts=facts | {"device": "cuda:0"})
    known, _ = start(facts=facts | {"device": "cpu"})
    logits = 3 * 512 * 50_000 * 4  # three copies in float32
    assert known == int((0.8 * FREE - COST.fixed_bytes - logits) / 60_000)
    assert known < seen


def test_off_runs_nothing_and_counts_the_kv_cache(start: Start) -> None:
    tokens, engine = start(estimate_memory="off")
    assert not engine.steps
    assert tokens == int((0.8 * FREE - COST.fixed_bytes) / COST.bytes_per_token)


def test_manual_runs_nothing_and_trusts(start: Start) -> None:
    tokens, engine = start(estimate_memory="manual")
    assert not engine.steps
    assert tokens == manual_capacity(2048, 64, 20)


def test_a_system_that_reports_nothing_is_as_off(
    start: Start, options: EngineOptions, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected, engine = start(estimate_memory="off")

    def refuse(_: torch.device) -> object:
        raise PermissionError("no clear_refs")

    monkeypatch.setattr(profiler, "PeakMeter", refuse)
    assert capacity(engine, options) == expected
    assert tgis_warnings(caplog) == ["memory cannot be measured here, ESTIMATE_MEMORY is off then: no clear_refs"]


def test_no_room_at_all_stops_the_start_and_says_what_to_lower(start: Start) -> None:
    with pytest.raises(StartError, match=r"0 bytes are there .* 64 rows take 10 MiB.*; lower MAX_BATCH_SIZE, choose a"):
        start(estimate_memory="off", batch_safety_margin=100)
