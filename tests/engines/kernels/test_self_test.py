"""A kernel is used only where it gives what PyTorch gives."""

from collections.abc import Callable
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from torch import Tensor

from tgis.engines.kernels.cuda.self_test import KernelSelfTest, is_fatal

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

    self_test = KernelSelfTest()
    for kind in ("a", "a", "b", "a"):
        assert torch.equal(self_test.run(kind, kernel, counted, torch.clone, X), kernel(X))
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
        (lambda x: x + torch.nan, torch.float32, "off by inf"),
        (lambda x: (x + 1).masked_fill(x == 0, torch.inf), torch.float32, "off by inf"),
        (lambda x: x + 1 + (x > 3), torch.int64, "33% of the numbers differ"),
        (lambda x: x[1:], torch.float32, "torch.float32 (5,) instead of torch.float32 (6,)"),
    ],
)
def test_another_leaves_the_work_to_pytorch(
    kernel: Callable[[Tensor], Tensor], dtype: torch.dtype, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    self_test, x = KernelSelfTest(), X.to(dtype)
    for kind in ("a", "a", "b"):
        assert torch.equal(self_test.run(kind, kernel, plain, torch.clone, x), plain(x))
    assert len(caplog.messages) == 2
    first, second = caplog.messages
    assert "(1 kernels failed so far)" in first
    assert "(2 kernels failed so far)" in second
    assert reason in first


def test_a_share_of_integers_may_differ_where_near_ties_decide() -> None:
    def kernel(x: Tensor) -> Tensor:
        return x + 1 + (x == 9)

    x = torch.arange(100)
    assert torch.equal(KernelSelfTest(0.02).run("a", kernel, plain, torch.clone, x), kernel(x))
    assert torch.equal(KernelSelfTest().run("a", kernel, plain, torch.clone, x), plain(x))


@pytest.mark.parametrize(("index", "other"), [(1, 0.0), (2, -torch.inf), (3, torch.nan)])
def test_numbers_that_are_not_finite_must_be_the_same(index: int, other: float) -> None:
    def right(x: Tensor) -> Tensor:
        return x + 1.00001

    def wrong(x: Tensor) -> Tensor:
        return right(x).index_fill(0, torch.tensor(index), other)

    x = torch.tensor([1.0, torch.nan, torch.inf, -torch.inf])
    for kernel, used in ((right, right), (wrong, plain)):
        assert torch.equal(KernelSelfTest().run("a", kernel, plain, torch.clone, x)[:1], used(x)[:1])


@pytest.mark.parametrize(
    ("error", "fatal"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), True),
        (torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing"), False),
        (torch.AcceleratorError("CUDA error: operation failed due to a previous error during capture"), False),
        (RuntimeError("called a synchronizing CUDA operation"), False),
    ],
)
def test_fatal_errors_are_no_trial(error: Exception, fatal: bool) -> None:
    assert is_fatal(error) == fatal
    kernel = mock.Mock(side_effect=error, __name__="kernel")
    with pytest.raises(type(error)) if fatal else nullcontext():
        assert torch.equal(KernelSelfTest().run("a", kernel, plain, torch.clone, X), plain(X))
