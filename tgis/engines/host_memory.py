"""Memory on the host: copies to and from the device, one each way per step, and tensors in huge pages.

On CUDA the memory of copies is pinned, and torch does not reuse it before the copy is done; on CPUs nothing is copied.
Weights and the KV cache are in huge pages: every step reads them, and translating addresses of 4 KiB pages takes time.
"""

import mmap
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Part = Sequence[int] | NDArray[np.int64]

_ALIGNMENT = 2  # alignment in int64: 16 bytes, a condition under which Triton specializes kernels
_PAGE = 2 << 20
_CHUNK = 64 << 20  # shared by several tensors
_CACHE_LINE = 64


def upload(parts: Sequence[Part], device: torch.device) -> list[Tensor]:
    """Copy each part to an int64 tensor of its shape; all are views of one tensor, aligned for compiled kernels."""
    arrays = [np.asarray(part, np.int64) for part in parts]
    ends = list(accumulate(array.size + -array.size % _ALIGNMENT for array in arrays))
    packed, starts = np.zeros(ends[-1], np.int64), [0, *ends[:-1]]
    for start, array in zip(starts, arrays, strict=True):
        packed[start : start + array.size].reshape(array.shape)[...] = array
    on_device = _copy_async(torch.from_numpy(packed), device)
    return [on_device[start : start + a.size].view(a.shape) for start, a in zip(starts, arrays, strict=True)]


def to_device(values: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Make a tensor on the device; unlike torch.tensor, this does not wait for the work queued on CUDA."""
    return _copy_async(torch.tensor(values, dtype=dtype), device)


def _copy_async(x: Tensor, device: torch.device) -> Tensor:
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def download(x: Tensor) -> Callable[[], list[float]]:
    """Queue a copy of a tensor to the host. Returns a function that waits for the copy, but not for work that is queued
    later.
    """
    host, copied = x, torch.cuda.Event() if x.is_cuda else None
    if copied is not None:
        host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
        copied.record()

    def wait() -> list[float]:
        if copied is not None:
            copied.synchronize()
        return host.tolist()

    return wait


class HugePageBuffer:
    """Zeros that take memory when they are first written, in huge pages if the system has them."""

    def __init__(self, num_bytes: int, place: float = 0.0) -> None:
        """`place`, 0 to 1, is where in a huge page the buffer begins. OutOfMemoryError if the system refuses."""
        offset = int(place * _PAGE) // _CACHE_LINE * _CACHE_LINE
        self._size = -(-(offset + num_bytes) // _PAGE) * _PAGE
        try:
            self._memory = mmap.mmap(-1, self._size + _PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise torch.OutOfMemoryError(f"{num_bytes} bytes: {error.strerror}") from error
        mapped = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._start = -mapped.data_ptr() % _PAGE
        self.bytes = mapped[self._start + offset :][:num_bytes]
        with suppress(OSError):  # the kernel may have no huge pages
            self._memory.madvise(mmap.MADV_HUGEPAGE, self._start, self._size)

    def clear(self) -> None:
        """Give the memory back to the system; the buffer reads as zeros then."""
        self._memory.madvise(mmap.MADV_DONTNEED, self._start, self._size)


class HugePages:
    """Allocates tensors side by side in huge pages."""

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def copy_of(self, x: Tensor) -> Tensor:
        size = -(-x.nbytes // _CACHE_LINE) * _CACHE_LINE
        if size > len(self._free):
            self._free = HugePageBuffer(max(size, _CHUNK)).bytes
        memory, self._free = self._free[:size], self._free[size:]
        return memory[: x.nbytes].view(x.dtype).view(x.shape).copy_(x)
