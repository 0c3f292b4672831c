"""The small kernels of a step on a real GPU."""

import pytest
import torch
from step_kernel_cases import errors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_writes_and_choices_are_those_of_pytorch() -> None:
    wrong = errors("cuda", [torch.float32, torch.float16, torch.bfloat16])
    assert {name: count for name, count in wrong.items() if count} == {}
