"""Draws in C, for every instruction set, against plain PyTorch: the same tokens."""

import math

import pytest
import torch
from cpu_kernels import kernels_of, num_threads
from gumbel_max_cases import CASES, Case, inputs

from tgis.engines.kernels.cpu.build import isa_flags
from tgis.engines.kernels.cpu.sampling import CpuGumbelMax
from tgis.engines.sampling import draws
from tgis.engines.sampling.logits_processors import Scores


@pytest.fixture(params=list(isa_flags()))
def kernel(request: pytest.FixtureRequest) -> CpuGumbelMax:
    return CpuGumbelMax(kernels_of(request.param))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_tokens_are_those_of_plain_pytorch(kernel: CpuGumbelMax, case: Case, threads: int) -> None:
    scores, keys = inputs(case)
    with num_threads(threads):
        found = kernel(scores.values, scores.max_score, scores.temperature, keys)
    assert torch.equal(found, draws.draw(scores, keys))


def test_scores_may_be_a_view(kernel: CpuGumbelMax) -> None:
    whole, keys = torch.randn(5, 3, 700), torch.arange(5)[:, None]
    for values in (whole[:, -1], whole.transpose(1, 2)[..., 0], whole[:0, 0]):
        count = len(values)
        scores = Scores(values, values.amax(-1, keepdim=True), torch.ones(count, 1, dtype=torch.float64))
        found = kernel(values, scores.max_score, scores.temperature, keys[:count])
        assert torch.equal(found, draws.draw(scores, keys[:count])) if count else found.shape == (0, 1)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_without_finite_scores_gets_some_token(kernel: CpuGumbelMax, bad: float) -> None:
    values = torch.full((3, 100), bad)
    ones = torch.ones(3, 1, dtype=torch.float64)
    found = kernel(values, values.amax(-1, keepdim=True), ones, torch.arange(3)[:, None])
    assert ((found >= 0) & (found < 100)).all()
