"""Races on a real GPU end as in plain PyTorch, but for near ties."""

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
