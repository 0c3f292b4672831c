"""The best token and draws in C, for every instruction set: tables and tokens are those of plain PyTorch."""

import math

import pytest
import torch
from cpu_kernels import num_threads, of_each_isa
from gumbel_max_cases import CASES, Case, inputs

from tgis.engines.kernels.cpu.library import CpuKernels
from tgis.engines.kernels.cpu.sampling import CpuArgmax, CpuGumbelMax
from tgis.engines.sampling.draws import best_tokens, draw
from tgis.engines.sampling.logits_processors import Scores

kernels = of_each_isa


@pytest.fixture
def argmax(kernels: CpuKernels) -> CpuArgmax:
    return CpuArgmax(kernels)


@pytest.fixture
def gumbel_max(kernels: CpuKernels) -> CpuGumbelMax:
    return CpuGumbelMax(kernels)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocab_size", "threads"), [(1, 1), (5, 2), (16, 1), (33, 1), (4099, 2)])
def test_of_equal_scores_the_lowest_id(argmax: CpuArgmax, dtype: torch.dtype, vocab_size: int, threads: int) -> None:
    scores = torch.randn(40, vocab_size, generator=torch.Generator().manual_seed(0)).mul(2).round().to(dtype)
    scores[0], scores[1] = 0.0, -3e38
    with num_threads(threads):
        found = argmax(scores, details=False)
    expected = (scores == scores.amax(-1, keepdim=True)).int().argmax(-1)
    assert found.tolist() == [[token, 0, 0, 0, 0] for token in expected.tolist()]
    assert torch.equal(found, best_tokens(scores, details=False))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocab_size", "spread"), [(1, 3.0), (5, 200.0), (16, 0.01), (4099, 3.0), (49152, 0.01)])
def test_details_are_those_of_float64(argmax: CpuArgmax, dtype: torch.dtype, vocab_size: int, spread: float) -> None:
    scores = torch.randn(3, vocab_size, generator=torch.Generator().manual_seed(0)).mul(spread).to(dtype)
    scores[2, 1:] = -math.inf  # as a grammar leaves them
    tables = argmax(scores, details=True), best_tokens(scores, details=True)
    expected = scores.double().log_softmax(-1).amax(-1)
    for table in tables:
        assert torch.equal(table[:, [0, 1, 4]], argmax(scores, details=False)[:, [0, 1, 4]])
        assert (table[:, 2] - expected).abs().max() < 1e-6
        assert (table[:, 3] == 1).all()


def test_scores_may_be_a_view(argmax: CpuArgmax, gumbel_max: CpuGumbelMax) -> None:
    whole, keys = torch.randn(5, 3, 700), torch.arange(5)[:, None]
    for values in (whole[:, -1], whole.transpose(1, 2)[..., 0]):
        assert torch.equal(argmax(values, details=False), best_tokens(values, details=False))
        scores = Scores(values, values.amax(-1, keepdim=True), torch.ones(5, 1, dtype=torch.float64))
        assert torch.equal(gumbel_max(values, scores.max_score, scores.temperature, keys), draw(scores, keys))
    assert argmax(whole[:0, 0], details=True).shape == (0, 5)
    none = torch.empty(0, 1)
    assert gumbel_max(whole[:0, 0], none, none.double(), keys[:0]).shape == (0, 1)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 17, 96, 99, slice(None)])
def test_a_row_is_invalid_if_its_highest_score_is_not_finite(argmax: CpuArgmax, bad: float, place: int | slice) -> None:
    scores = torch.randn(2, 100)
    scores[0, place] = bad
    found = argmax(scores, details=True)
    assert found[:, 1].tolist() == best_tokens(scores, details=True)[:, 1].tolist()
    assert found[1].isfinite().all()
    assert ((found[:, 0] >= 0) & (found[:, 0] < 100)).all()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_tokens_are_those_of_plain_pytorch(gumbel_max: CpuGumbelMax, case: Case) -> None:
    scores, keys = inputs(case)
    expected = draw(scores, keys)
    for threads in (1, 2):
        with num_threads(threads):
            assert torch.equal(gumbel_max(scores.values, scores.max_score, scores.temperature, keys), expected)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_without_finite_scores_gets_some_token(gumbel_max: CpuGumbelMax, bad: float) -> None:
    values = torch.full((3, 100), bad)
    ones = torch.ones(3, 1, dtype=torch.float64)
    found = gumbel_max(values, values.amax(-1, keepdim=True), ones, torch.arange(3)[:, None])
    assert ((found >= 0) & (found < 100)).all()
