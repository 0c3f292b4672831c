"""Tensors in huge pages, for memory that every step reads: address translation of 4 KiB pages slows reading down.

Where the system has no huge pages, it is ordinary memory.
"""

import ctypes
import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

_PAGE = 2 << 20  # bytes
_CHUNK = 64 << 20  # bytes that several tensors share
_ALIGNMENT = 64  # of tensors: a cache line


def empty_in_huge_pages(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A large tensor; where PyTorch's memory is fresh from the system, the kernel backs it with huge pages."""
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
        size = -(-x.nbytes // _ALIGNMENT) * _ALIGNMENT
        if size > len(self._free):
            self._free = empty_in_huge_pages((max(size, _CHUNK),), torch.uint8)
        memory, self._free = self._free[:size], self._free[size:]
        return memory[: x.nbytes].view(x.dtype).view(x.shape).copy_(x)
