"""The model of a GPU's step times: the steps that it was made from."""

import pytest
from batches import request

from benchmarks.gpu_model import HOST_SECONDS, MODELS
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


def test_short_prompts_are_bound_by_launches_and_long_ones_by_products() -> None:
    model = MODELS["captured and compiled"]
    short, long = (StepPlan.compute_all([Sequence(request(1, count), 0.0)]) for count in (10, 8500))
    assert model.step(short)[1] == pytest.approx(HOST_SECONDS + 9.5e-3)
    assert model.step(long)[1] == pytest.approx(HOST_SECONDS + 0.2)
