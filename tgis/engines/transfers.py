"""Asynchronous copies between host and device, one each way per step.

On CUDA the memory on the host is pinned; torch does not reuse it before the copy is done. On CPUs nothing is copied.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Part = Sequence[int] | NDArray[np.int64]

_ALIGNMENT = 2  # numbers: 16 bytes, by which Triton specializes kernels


def upload(parts: Sequence[Part], device: torch.device) -> list[Tensor]:
    """Copy each part to an int64 tensor of its shape; all are views of one tensor, aligned for compiled kernels."""
    arrays = [np.asarray(part, np.int64) for part in parts]
    ends = list(accumulate(array.size + -array.size % _ALIGNMENT for array in arrays))
    numbers, starts = np.zeros(ends[-1], np.int64), [0, *ends[:-1]]
    for start, array in zip(starts, arrays, strict=True):
        numbers[start : start + array.size].reshape(array.shape)[...] = array
    on_device = _copy_async(torch.from_numpy(numbers), device)
    return [on_device[start : start + a.size].view(a.shape) for start, a in zip(starts, arrays, strict=True)]


def to_device(values: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Make a tensor on the device; unlike torch.tensor, this does not wait for the work queued on CUDA."""
    return _copy_async(torch.tensor(values, dtype=dtype), device)


def _copy_async(numbers: Tensor, device: torch.device) -> Tensor:
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers.to(device)


class Download:
    """A copy to the host, queued behind what computes the numbers."""

    def __init__(self, numbers: Tensor) -> None:
        self._host = numbers
        self._copied: torch.cuda.Event | None = None
        if numbers.is_cuda:
            self._host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._host.copy_(numbers, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def wait(self) -> list[float]:
        """Wait for the numbers only, while work that was queued later keeps running."""
        if self._copied is not None:
            self._copied.synchronize()
        numbers: list[float] = self._host.tolist()
        return numbers
