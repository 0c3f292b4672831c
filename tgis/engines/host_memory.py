"""Memory on the host: copies to and from the device, one each way per step, and tensors in huge pages.

On CUDA the memory of copies is pinned, and torch does not reuse it before the copy is done; on CPUs nothing is copied.
What every step reads, weights and KV cache, is in huge pages: address translation of 4 KiB pages slows reading down.
"""

import ctypes
import math
import mmap
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Part = Sequence[int] | NDArray[np.int64]

_ALIGNMENT = 2  # numbers: 16 bytes, by which Triton specializes kernels
_PAGE = 2 << 20  # bytes
_CHUNK = 64 << 20  # bytes that several tensors share
_CACHE_LINE = 64


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


def empty_in_huge_pages(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A large tensor. Where PyTorch's memory is fresh from the system, the kernel backs it with huge pages; where the
    system has none, it is ordinary memory.
    """
    size = math.prod(shape) * dtype.itemsize
    memory = torch.empty(size + 2 * _PAGE, dtype=torch.uint8)
    start = -memory.data_ptr() % _PAGE
    whole_pages = ctypes.c_void_p(memory.data_ptr() + start), ctypes.c_size_t(-(-size // _PAGE) * _PAGE)
    ctypes.CDLL(None).madvise(*whole_pages, mmap.MADV_HUGEPAGE)
    return memory[start : start + size].view(dtype).view(*shape)


class HugePages:
    """Allocates tensors side by side in huge pages."""

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def copy_of(self, x: Tensor) -> Tensor:
        size = -(-x.nbytes // _CACHE_LINE) * _CACHE_LINE
        if size > len(self._free):
            self._free = empty_in_huge_pages((max(size, _CHUNK),), torch.uint8)
        memory, self._free = self._free[:size], self._free[size:]
        return memory[: x.nbytes].view(x.dtype).view(x.shape).copy_(x)
