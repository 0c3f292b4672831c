"""Measuring memory, against engines whose memory is a formula."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import MemoryFormula, MiB, SyntheticEngine

from tgis.batcher.memory_model import BatchShape
from tgis.engines.memory.fitting import Sample, StepCosts
from tgis.engines.memory.probing import DummyRunner
from tgis.engines.memory.profiler import declared_memory
from tgis.errors import StartError

GiB = 1 << 30
LONG = 2048

CHUNKED = st.builds(
    MemoryFormula,
    step=st.integers(0, 300 * MiB),
    row=st.integers(0, 8 * MiB),
    token=st.integers(0, 10_000),
    pass_token=st.integers(0, 200_000),
    prefill_token=st.integers(0, 50_000),
    input_logprobs_token=st.integers(0, 400_000),
)
WHOLE = st.builds(
    MemoryFormula,
    step=st.integers(0, 100 * MiB),
    row=st.integers(0, 2 * MiB),
    token=st.integers(0, 10_000),
    prefill_token=st.integers(0, 20_000),
    square=st.floats(20, 1000),
)


def prober(engine: SyntheticEngine, room: int = 64 * GiB) -> DummyRunner:
    return DummyRunner(engine, engine, engine.held, room)


def costs_of(formula: MemoryFormula, power: int) -> StepCosts:
    engine = SyntheticEngine(formula, encoder_decoder=power == 2)
    return prober(engine).profile_padded(LONG, power)


@settings(max_examples=50, deadline=None)
@given(formula=CHUNKED, rows=st.integers(1, 64))
def test_no_step_takes_more_than_is_said_and_large_ones_not_much_less(formula: MemoryFormula, rows: int) -> None:
    costs = costs_of(formula, 1)
    worst = formula.prefill(64, 8, True, 512) + formula.prefill(1, 512, True, 512)
    for width in (1, 8, 100, 1000, 4000, 100_000):
        said, taken = costs.reserve + rows * width * costs.token, formula.decode(rows, width)
        assert taken <= 1.0001 * said
        assert said <= 1.0001 * taken + worst
        joining = rows if rows * width <= 512 else 1  # prefills of several rows are no larger
        said, taken = costs.reserve + joining * width * costs.prefill, formula.prefill(joining, width, True, 512)
        assert taken <= 1.0001 * said + 2  # a sample is whole bytes
        assert said <= 1.0001 * taken + worst


@settings(max_examples=50, deadline=None)
@given(formula=WHOLE)
def test_inputs_that_are_computed_whole_take_memory_by_the_square(formula: MemoryFormula) -> None:
    costs = costs_of(formula, 2)
    for width in (1, 100, 1000, 2048, 4000):
        said, taken = costs.reserve + width**2 * costs.prefill, formula.prefill(1, width, False, 512)
        assert 1.0001 * said >= taken
    assert said < 1.5 * taken + costs.reserve


def test_costs_of_a_known_device_are_found_exactly() -> None:
    formula = MemoryFormula(step=10 * MiB, row=MiB, token=1000, pass_token=5000, prefill_token=3000)
    costs = costs_of(formula, 1)
    assert costs.token == 1000
    assert costs.prefill == 3000
    assert costs.reserve == 74 * MiB + 512 * 5000  # 64 rows of 8 tokens join


def test_noise_makes_no_cost_negative() -> None:
    short = [Sample(1, 10, prefill=True, peak=900), Sample(1, 11, prefill=False, peak=800)]
    long = [Sample(1, 20, prefill=True, peak=700), Sample(1, 21, prefill=False, peak=100)]
    assert StepCosts.fitted(short, long, [], 1) == StepCosts(900.0, 0.0, 0.0)


def test_costs_that_no_measurement_can_give_are_unsound() -> None:
    assert StepCosts(1.0, 0.0, 2.5).sound
    assert not StepCosts(float("inf")).sound
    assert not StepCosts(1.0, token=-0.1).sound
    assert not StepCosts(1.0, prefill=float("nan")).sound


def test_the_worst_step_of_an_engine_with_blocks() -> None:
    formula = MemoryFormula(step=5 * MiB, row=MiB, token=2000, pass_token=3000, input_logprobs_token=50_000)
    engine = SyntheticEngine(formula, block_size=16)
    taken = prober(engine).profile_paged(1000, 5000)  # 448 of a prompt, and 64 rows that decode; all want facts
    assert taken == pytest.approx(5 * MiB + 64 * MiB + 512 * 53_000 - 53_000 + 5000 * 2000, rel=0.01)


@pytest.mark.parametrize("longest", [2, 3, 20])
@pytest.mark.parametrize("rows", [1, 3, 1000])
def test_the_smallest_and_largest_batches_can_be_measured(rows: int, longest: int) -> None:
    formula = MemoryFormula(pass_token=100_000)
    costs = prober(SyntheticEngine(formula, max_batch_size=rows)).profile_padded(longest, 1)
    assert costs.reserve + rows * longest * costs.token >= formula.decode(rows, longest)
    assert prober(SyntheticEngine(formula, max_batch_size=rows, block_size=16)).profile_paged(longest, longest) > 0


def test_a_full_batch_that_does_not_fit_is_refused_before_it_runs() -> None:
    engine = SyntheticEngine(MemoryFormula(row=10 * MiB), capacity=400 * MiB)
    with pytest.raises(StartError, match=r"400 MiB of memory may not do for .* MAX_BATCH_SIZE=64 rows: lower it"):
        prober(engine, 400 * MiB).profile_padded(LONG, 1)
    assert len(engine.rows) < 64


def test_running_out_of_memory_is_a_clear_end() -> None:
    engine = SyntheticEngine(MemoryFormula(row=10 * MiB), capacity=400 * MiB)
    with pytest.raises(StartError, match=r"MAX_BATCH_SIZE=64 rows: lower it, choose a smaller DTYPE"):
        prober(engine, 100 * GiB).profile_padded(LONG, 1)  # nobody has told how little there is


@given(length=st.integers(2, 200_000), rows=st.integers(1, 512), margin=st.integers(0, 100))
def test_declared_memory_counts_the_margin_once_and_fits_one_request(length: int, rows: int, margin: int) -> None:
    memory = declared_memory(length, rows, margin)
    assert memory.token_capacity == max(length, length * rows * (100 - margin) // 100)
    assert memory.prefill_cost(BatchShape.of([length], padded=True)) <= memory.token_capacity


def test_declared_memory_is_that_of_tgis_but_for_the_second_margin() -> None:
    """In tokens of context, not in percent: 100 percent are 8 x 200 tokens."""
    memory = declared_memory(200, 8, 20)
    assert memory.token_capacity == 0.8 * 8 * 200
    assert memory.prefill_cost(BatchShape.of([200] * 8, padded=True)) == 8 * 200
    assert memory.prefill_cost(BatchShape.of([100] * 8, padded=True)) == 0.25 * 8 * 200  # quadratic
