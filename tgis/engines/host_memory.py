"""Memory on the host: copies to and from the device, one each way per step, and tensors in huge pages.

On CUDA the memory of copies is pinned, and torch does not reuse it before the copy is done; on CPUs nothing is copied.
What every step reads, weights and KV cache, is in huge pages: address translation of 4 KiB pages slows reading down.
"""

import ctypes
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


def download(numbers: Tensor) -> Callable[[], list[float]]:
    """Queue a copy to the host behind what computes the numbers. Returns what waits for these, and gives them, while
    work that was queued later keeps running.
    """
    host, copied = numbers, torch.cuda.Event() if numbers.is_cuda else None
    if copied is not None:
        host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True).copy_(numbers, non_blocking=True)
        copied.record()

    def wait() -> list[float]:
        if copied is not None:
            copied.synchronize()
        found: list[float] = host.tolist()
        return found

    return wait


class Mapping:
    """Zeros that take memory when they are first written, in huge pages where the system has them."""

    def __init__(self, num_bytes: int, place: float = 0.0) -> None:
        """Zeros from the `place`, 0 to 1, of a huge page on. OutOfMemoryError if the system refuses so much."""
        offset = int(place * _PAGE) // _CACHE_LINE * _CACHE_LINE
        self._size = -(-(offset + num_bytes) // _PAGE) * _PAGE
        try:
            self._memory = mmap.mmap(-1, self._size + _PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise torch.OutOfMemoryError(f"{num_bytes} bytes: {error.strerror}") from error
        whole = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._start = -whole.data_ptr() % _PAGE
        self._address = whole.data_ptr() + self._start
        self.bytes = whole[self._start + offset :][:num_bytes]
        with suppress(OSError):  # of a kernel without huge pages
            self._memory.madvise(mmap.MADV_HUGEPAGE, self._start, self._size)

    def clear(self) -> None:
        """Give the memory back; zeros are left."""
        self._memory.madvise(mmap.MADV_DONTNEED, self._start, self._size)

    @property
    def resident_bytes(self) -> int:
        """Bytes that take memory, pages that were only read included."""
        pages = np.empty(self._size // mmap.PAGESIZE, np.uint8)
        found = map(ctypes.c_void_p, (self._address, self._size, pages.ctypes.data))
        return mmap.PAGESIZE * int(np.count_nonzero(pages)) if ctypes.CDLL(None).mincore(*found) == 0 else self._size


class HugePages:
    """Allocates tensors side by side in huge pages."""

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def copy_of(self, x: Tensor) -> Tensor:
        size = -(-x.nbytes // _CACHE_LINE) * _CACHE_LINE
        if size > len(self._free):
            self._free = Mapping(max(size, _CHUNK)).bytes
        memory, self._free = self._free[:size], self._free[size:]
        return memory[: x.nbytes].view(x.dtype).view(x.shape).copy_(x)
