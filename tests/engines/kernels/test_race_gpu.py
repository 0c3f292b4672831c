"""Races on a real GPU end as in plain PyTorch, but for near ties."""

import filtered_cases
import pytest
import torch
from race_cases import CASES, Case, changed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_tokens_are_those_of_plain_pytorch(case: Case) -> None:
    from tgis.engines.kernels.cuda.race import race_winners

    assert changed(case, race_winners, "cuda") < 0.02


def test_tokens_that_are_filtered_are_those_of_plain_pytorch() -> None:
    shares = {name: filtered_cases.changed(case, "cuda") for name, case in filtered_cases.CASES.items()}
    assert {name: share for name, share in shares.items() if share} == {}
