"""The model of a GPU's step times: the steps that it was made from."""

import pytest
from batches import request

from benchmarks.gpu_model import BYTES_PER_SECOND, HOST_SECONDS, KV_BYTES, MODELS
from tgis.batcher.sequence import Sequence, StepPlan

CONTEXT = 640


@pytest.mark.parametrize(("rows", "milliseconds"), [(1, 4.7), (64, 6.5), (256, 14.4)])
def test_compiled_decode_steps(rows: int, milliseconds: float) -> None:
    seqs = [Sequence(request(n, CONTEXT - 1), 0.0) for n in range(rows)]
    for seq in seqs:
        seq.num_computed_tokens = CONTEXT - 1
        seq.tokens.append(7)
    tokens, seconds = MODELS["captured and compiled, c51a0fb"].step(StepPlan.compute_all(seqs))
    assert len(tokens) == rows
    assert 1e3 * seconds == pytest.approx(milliseconds, rel=0.01)


def prompts(*counts: int) -> StepPlan:
    return StepPlan.compute_all([Sequence(request(n, count), 0.0) for n, count in enumerate(counts)])


def test_short_prompts_are_bound_by_launches_and_long_ones_by_products() -> None:
    model = MODELS["captured and compiled, c51a0fb"]
    assert model.step(prompts(10))[1] == pytest.approx(HOST_SECONDS + 9.5e-3)
    assert model.step(prompts(8500))[1] == pytest.approx(HOST_SECONDS + 0.2)


def test_short_prompts_are_captured() -> None:
    """All of whose tokens read all tokens before them."""
    model = MODELS["captured and compiled"]
    assert model.step(prompts(10))[1] == pytest.approx(HOST_SECONDS + model.decode_seconds(10), rel=1e-3)
    reading = 2 * 100 * 100 * KV_BYTES / BYTES_PER_SECOND
    assert model.step(prompts(100, 100))[1] == pytest.approx(HOST_SECONDS + model.decode_seconds(200) + reading)
    assert model.step(prompts(8500))[1] == pytest.approx(HOST_SECONDS + 0.2)
