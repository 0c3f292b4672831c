"""A kernel is used only where it gives what PyTorch gives."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tgis.engines.kernels.cuda.trials import KernelTrials

X = torch.arange(6, dtype=torch.bfloat16)


def plain(x: Tensor) -> Tensor:
    return x + 1


def test_a_kernel_that_gives_the_same_is_compared_once_for_each_kind() -> None:
    calls: list[str] = []

    def kernel(x: Tensor) -> Tensor:
        calls.append("kernel")
        return x + 1.001

    def counted(x: Tensor) -> Tensor:
        calls.append("plain")
        return x + 1

    trials = KernelTrials()
    for kind in ("a", "a", "b", "a"):
        assert torch.equal(trials.run(kind, kernel, counted, torch.clone, X), kernel(X))
        calls.pop()
    assert calls == ["kernel", "plain", "kernel", "kernel", "kernel", "plain", "kernel", "kernel"]


def not_compiled(_: Tensor) -> Tensor:
    raise TypeError("at 3:1:\nno such instruction")


@pytest.mark.parametrize(
    ("kernel", "dtype", "reason"),
    [
        (not_compiled, torch.float32, "TypeError('at 3:1:\\nno such instruction')"),
        (lambda x: x + 1.2, torch.bfloat16, "off by 5"),
        (lambda x: x + 1.001, torch.float32, "off by 2"),
        (lambda x: x + torch.nan, torch.float32, "off by 1.0e+00"),
        (lambda x: x + 1 + (x > 3), torch.int64, "33% of the numbers differ"),
        (lambda x: x[1:], torch.float32, "torch.float32 (5,) instead of torch.float32 (6,)"),
    ],
)
def test_another_leaves_the_work_to_pytorch(
    kernel: Callable[[Tensor], Tensor], dtype: torch.dtype, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    trials, x = KernelTrials(), X.to(dtype)
    for kind in ("a", "a", "b"):
        assert torch.equal(trials.run(kind, kernel, plain, torch.clone, x), plain(x))
    assert len(caplog.messages) == 2
    first, second = caplog.messages
    assert "(1 kernels failed so far)" in first
    assert "(2 kernels failed so far)" in second
    assert reason in first


def test_a_device_out_of_memory_is_no_trial() -> None:
    def kernel(_: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    trials = KernelTrials()
    with pytest.raises(torch.OutOfMemoryError):
        trials.run("a", kernel, plain, torch.clone, X)
