"""Dummy batches on engines whose memory is a formula: no real step needs more than they find;
the capacity that the modes of ESTIMATE_MEMORY find.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from batches import engine_options
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import tgis_warnings

from tgis.batcher.sequence import Sequence, StepPlan
from tgis.engines.base import Engine, StepResult
from tgis.engines.memory import available, profiler
from tgis.engines.memory.capacity import KVCacheCost, manual_capacity, padded_capacity
from tgis.engines.memory.profiler import DummyRunner
from tgis.errors import OutOfMemory, StartError
from tgis.ipc.messages import EngineInfo, EngineOptions

MiB = 1 << 20
MODEL_BYTES = 500 * MiB  # bytes of the model
KV_BYTES = 40_000  # of a token in the KV cache
PASS_TOKENS = 512  # of one forward pass of a decoder-only model


@dataclass(frozen=True)
class MemoryFormula:
    """Bytes of a step besides the KV cache; sequences of a padded engine are as long as the longest."""

    step: int = 30 * MiB
    row: int = MiB
    width: int = 0  # per token of the longest sequence
    computed: int = 0  # per token of a forward pass
    told: int = 0  # per token of a forward pass that computes logprobs of the input
    square: float = 0.0  # per token and token of its sequence

    def bytes(self, rows: int, width: int, computed: int, *, told: int = 0) -> int:
        tokens = computed * self.computed + told * self.told + int(computed * width * self.square)
        return self.step + rows * self.row + width * self.width + tokens


@dataclass
class SyntheticEngine(Engine):
    """Holds the sequences of its batch."""

    formula: MemoryFormula
    capacity: int = 1 << 60
    max_batch_size: int = 64
    encoder_decoder: bool = False
    block_size: int = 0
    device: str = "none"
    vocab_size: int = 100
    steps: int = 0
    rows: dict[int, Sequence] = field(default_factory=dict)
    peak_bytes: int = 0
    longest_output: int = 0

    def __post_init__(self) -> None:
        kind = self.encoder_decoder, not self.block_size, self.max_batch_size
        sizes = 0, PASS_TOKENS, self.block_size  # the first: of the KV cache
        names = "synthetic", "Synthetic", self.device, "none"
        self.info = EngineInfo(*names, self.vocab_size, *kind, *sizes, input_vocab_size=50)

    def step(self, plan: StepPlan) -> StepResult:
        """Account for the memory of the step."""
        self.steps += 1
        self.rows |= {seq.id: seq for seq in plan.seqs}
        self.longest_output = max(
            self.longest_output, *(len(seq.tokens) - len(seq.request.tokens) for seq in plan.seqs)
        )
        assert all(max(seq.tokens) < min(self.info.vocab_size, self.info.input_vocab_size) for seq in plan.seqs)
        assert len(self.rows) <= self.max_batch_size
        assert {seq.request.logprob_options.top_n_tokens for seq in plan.seqs} == {10}
        ends = [seq.num_computed_tokens + n for seq, n in zip(plan.seqs, plan.num_scheduled_tokens, strict=True)]
        assert all(len(seq.tokens) >= end for seq, end in zip(plan.seqs, ends, strict=True))
        rows, computed = len(plan.seqs), sum(plan.num_scheduled_tokens)
        if self.block_size:
            assert computed <= max(PASS_TOKENS, rows)
            assert all(len(seq.block_table) * self.block_size > end for seq, end in zip(plan.seqs, ends, strict=True))
            assert all({*seq.block_table} <= {0, 1, 2} for seq in plan.seqs)
        else:
            computed = rows * max(plan.num_scheduled_tokens)
            computed = computed if self.encoder_decoder else min(computed, PASS_TOKENS)
        told = computed * (plan.has_prefill and plan.seqs[0].request.logprob_options.input_tokens)
        needed = self.formula.bytes(rows, max(ends), computed, told=told)
        self.peak_bytes = max(self.peak_bytes, MODEL_BYTES + self.kv_cache_bytes + needed)
        if self.kv_cache_bytes + needed > self.capacity:
            raise OutOfMemory("no room")
        return StepResult([[0]] * len(plan.sampled), [])

    def release(self, rows: Collection[Sequence]) -> None:
        for row in rows:
            del self.rows[row.id]

    @property
    def kv_cache_bytes(self) -> int:
        return 7 * MiB + KV_BYTES * sum(len(row.tokens) for row in self.rows.values())

    def find_peak(self, runner: DummyRunner) -> int:
        return runner.padded_peak(2046, PASS_TOKENS, chunked=True)

    def reset(self) -> int:
        """Begin to measure at what is used now; as `PeakMeter`."""
        self.peak_bytes = MODEL_BYTES + self.kv_cache_bytes
        return self.peak_bytes

    def peak(self) -> int:
        """The bytes at most since `reset`."""
        return self.peak_bytes


GiB = 1 << 30
MAX_LENGTH = 2048
FORMULAS = st.builds(
    MemoryFormula,
    step=st.integers(0, 300 * MiB),
    row=st.integers(0, 8 * MiB),
    computed=st.integers(0, 200_000),
    told=st.integers(0, 400_000),
)


def runner(engine: SyntheticEngine, available_bytes: int = 64 * GiB) -> DummyRunner:
    meter: Any = engine
    return DummyRunner(engine, meter, available_bytes, max_top_n_tokens=10)


@settings(max_examples=50)
@given(FORMULAS)
def test_chunks_need_what_a_full_batch_or_a_full_pass_does(formula: MemoryFormula) -> None:
    peak = runner(SyntheticEngine(formula)).padded_peak(MAX_LENGTH, PASS_TOKENS, chunked=True)
    full_batch, one = formula.bytes(64, 8, PASS_TOKENS, told=PASS_TOKENS), formula.bytes(1, 0, 512, told=PASS_TOKENS)
    assert peak == max(full_batch, one)


@settings(max_examples=50)
@given(st.builds(MemoryFormula, square=st.floats(20, 1000), told=st.just(9000)), st.integers(100, 6000))
def test_inputs_that_are_computed_whole_need_the_square_of_the_longest(formula: MemoryFormula, max_length: int) -> None:
    """And a requeued sequence computes all of its output again."""
    engine = SyntheticEngine(formula, encoder_decoder=True)
    peak = runner(engine, 10**15).padded_peak(max_length, 0, chunked=False)
    assert engine.longest_output == min(max_length, PASS_TOKENS)
    assert peak == max(formula.bytes(1, max_length, max_length), formula.bytes(64, 8, 64 * 8))


def test_inputs_whose_square_does_not_fit_are_refused_before_they_run() -> None:
    engine = SyntheticEngine(MemoryFormula(square=1000.0), capacity=30 * GiB, encoder_decoder=True)
    with pytest.raises(StartError, match="of memory may not do"):
        runner(engine, 10 * GiB).padded_peak(8000, 0, chunked=False)
    assert engine.steps == 10  # none is longer than 2048 tokens


def test_the_largest_step_of_a_paged_engine(caplog: pytest.LogCaptureFixture) -> None:
    formula = MemoryFormula(step=5 * MiB, row=MiB, width=2000, computed=3000, told=50_000)
    engine = SyntheticEngine(formula, block_size=16)
    caplog.set_level("INFO")
    peak = runner(engine).paged_peak(5008, 3)  # 448 of a prompt, and 64 sequences that decode, all with logprobs
    assert not engine.rows
    assert caplog.messages == ["  64 sequences of 5008 tokens: 104 MiB beside the KV cache"]
    assert peak == pytest.approx(formula.bytes(64, 5008, 448 + 63, told=448 + 63), rel=0.001)


@pytest.mark.parametrize("max_length", [2, 3, 20])
@pytest.mark.parametrize("max_batch_size", [1, 3, 1000])
def test_the_smallest_and_largest_batches_can_be_measured(max_batch_size: int, max_length: int) -> None:
    formula = MemoryFormula(computed=100_000)
    padded = SyntheticEngine(formula, max_batch_size=max_batch_size)
    assert runner(padded).padded_peak(max_length, 128, chunked=True) >= formula.bytes(max_batch_size, max_length, 1)
    paged = SyntheticEngine(formula, max_batch_size=max_batch_size, block_size=16)
    assert runner(paged).paged_peak(max_length, 3) > 0


def test_a_full_batch_that_does_not_fit_is_refused_before_it_runs() -> None:
    engine = SyntheticEngine(MemoryFormula(row=10 * MiB), capacity=600 * MiB)
    with pytest.raises(StartError, match=r"600 MiB of memory may not do for .* MAX_BATCH_SIZE=64 rows: lower it"):
        runner(engine, 600 * MiB).padded_peak(MAX_LENGTH, 128, chunked=True)
    assert len(engine.rows) < 64


def test_running_out_of_memory_is_a_clear_end() -> None:
    engine = SyntheticEngine(MemoryFormula(row=10 * MiB), capacity=400 * MiB)
    with pytest.raises(StartError, match=r"MAX_BATCH_SIZE=64 rows: lower it, .* or grant more memory$"):
        runner(engine, 100 * GiB).padded_peak(MAX_LENGTH, 128, chunked=True)  # less is there than was reported


def test_manual_is_that_of_tgis_but_for_the_second_margin() -> None:
    """In tokens of context, not in percent: 100 percent are 8 x 200 tokens."""
    assert manual_capacity(200, 8, 20) == 0.8 * 8 * 200
    assert manual_capacity(200, 1, 20) == 200  # one request always fits


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
    assert start(estimate_memory="manual", batch_safety_margin=99)[0] == 2048


def test_a_system_that_reports_nothing_is_as_off(
    start: Start, options: EngineOptions, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected, engine = start(estimate_memory="off")

    def refuse(_: torch.device) -> object:
        raise PermissionError("no clear_refs")

    monkeypatch.setattr(profiler, "PeakMeter", refuse)
    assert (capacity(engine, options), profiler.profile(engine, options, CPU)) == (expected, 0)
    assert tgis_warnings(caplog) == ["memory cannot be measured here, ESTIMATE_MEMORY is off then: no clear_refs"] * 2


def test_no_room_at_all_stops_the_start_and_says_what_to_lower(start: Start) -> None:
    with pytest.raises(
        StartError,
        match=r"0 bytes are there .* 64 rows take 10 MiB.*: room for 0 tokens; lower MAX_B.*grant more memory$",
    ):
        start(estimate_memory="off", batch_safety_margin=100)
