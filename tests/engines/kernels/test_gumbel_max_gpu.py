"""Draws on a real GPU are those of plain PyTorch, except at near ties."""

import filtered_cases
import pytest
import torch
from gumbel_max_cases import CASES, Case, changed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_tokens_are_those_of_plain_pytorch(case: Case) -> None:
    from tgis.engines.kernels.cuda.sampling import gumbel_max

    assert changed(case, gumbel_max, "cuda") < 0.02


def test_tokens_that_are_filtered_are_those_of_plain_pytorch() -> None:
    shares = {name: filtered_cases.changed(case, "cuda") for name, case in filtered_cases.CASES.items()}
    assert {name: share for name, share in shares.items() if share} == {}
