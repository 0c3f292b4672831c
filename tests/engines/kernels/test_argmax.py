"""The best token in C, for every instruction set, against plain PyTorch."""

import math

import pytest
import torch
from cpu_kernels import kernels_of, num_threads

from tgis.engines.kernels.cpu.argmax import CpuArgmax
from tgis.engines.kernels.cpu.build import isa_flags


@pytest.fixture(params=list(isa_flags()))
def argmax(request: pytest.FixtureRequest) -> CpuArgmax:
    return CpuArgmax(kernels_of(request.param))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [1, 5, 16, 33, 4099])
@pytest.mark.parametrize("threads", [1, 2])
def test_of_equal_scores_the_lowest_id(argmax: CpuArgmax, dtype: torch.dtype, vocab_size: int, threads: int) -> None:
    scores = torch.randn(40, vocab_size, generator=torch.Generator().manual_seed(0)).mul(2).round().to(dtype)
    scores[:3] = torch.tensor([[0.0], [-math.inf], [-3e38]])
    with num_threads(threads):
        highest, ids = argmax(scores)
    expected = scores.amax(-1, keepdim=True)
    assert highest.dtype == torch.float32
    assert torch.equal(highest, expected.float())
    assert torch.equal(ids, (scores == expected).int().argmax(-1, keepdim=True))


def test_scores_may_be_a_view(argmax: CpuArgmax) -> None:
    whole = torch.randn(5, 3, 700)
    for scores in (whole[:, -1], whole.transpose(1, 2)[..., 0], whole[:0, 0]):
        assert all(map(torch.equal, argmax(scores), scores.max(-1, keepdim=True)))


@pytest.mark.parametrize("place", [0, 17, 96, 99])
def test_a_score_that_is_no_number_is_told(argmax: CpuArgmax, place: int) -> None:
    scores = torch.randn(2, 100)
    scores[0, place] = math.nan
    highest, ids = argmax(scores)
    assert highest.isnan().tolist() == [[True], [False]]
    assert 0 <= ids[0].item() < 100
