"""Dummy batches on engines whose memory is a formula: no real step needs more than they find."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_engine import PASS_TOKENS, MemoryFormula, MiB, SyntheticEngine

from tgis.engines.memory.capacity import manual_capacity
from tgis.engines.memory.profiler import DummyRunner
from tgis.errors import StartError

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
@given(formula=st.builds(MemoryFormula, square=st.floats(20, 1000)), max_length=st.integers(100, 6000))
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
    assert engine.peak_bytes < 10 * GiB


def test_the_largest_step_of_a_paged_engine() -> None:
    formula = MemoryFormula(step=5 * MiB, row=MiB, width=2000, computed=3000, told=50_000)
    engine = SyntheticEngine(formula, block_size=16)
    peak = runner(engine).paged_peak(5000, 3)  # 448 of a prompt, and 64 sequences that decode, all with logprobs
    assert peak == pytest.approx(formula.bytes(64, 5000, 448 + 63, told=448 + 63), rel=0.001)


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
    with pytest.raises(StartError, match=r"MAX_BATCH_SIZE=64 rows: lower it, choose a smaller DTYPE"):
        runner(engine, 100 * GiB).padded_peak(MAX_LENGTH, 128, chunked=True)  # less is there than was reported


def test_manual_is_that_of_tgis_but_for_the_second_margin() -> None:
    """In tokens of context, not in percent: 100 percent are 8 x 200 tokens."""
    assert manual_capacity(200, 8, 20) == 0.8 * 8 * 200
    assert manual_capacity(200, 1, 20) == 200  # one request always fits
