"""What the ranks of one machine add and gather through memory that they share, by collectives.c.

Sums are added in the order of the ranks, so bits depend on the number of ranks, never on the batch.
"""

import ctypes
import mmap

import torch
from torch import Tensor

from tgis.engines.kernels.cpu.library import INTEGER, POINTER, CpuKernels, structure

_CACHE_LINE = 64  # bytes, as in simd.h
_SLOT_BYTES = 1 << 20  # a round moves at most as much of a rank; a row of logits fits


# `rank_group` of collectives.c.
_RankGroup = structure(("memory", POINTER), ("rank num_ranks slot_bytes num_rounds", INTEGER))


def shared_bytes(num_ranks: int) -> int:
    """The size of the memory that the ranks share: counters, and two slots for each."""
    return num_ranks * (_CACHE_LINE + 2 * _SLOT_BYTES)


class CpuCollectives:
    """One rank's end. Every rank must make the same calls, one at a time."""

    def __init__(self, kernels: CpuKernels, fd: int, rank: int, num_ranks: int) -> None:
        """`fd`: memory of `shared_bytes`, at first all zero."""
        self._memory = mmap.mmap(fd, shared_bytes(num_ranks))
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._group = _RankGroup(address, rank, num_ranks, _SLOT_BYTES, 0)
        # A number where a structure could stand: recorded passes copy structures, but rounds are counted in this one.
        self._address = ctypes.addressof(self._group)
        self._num_ranks = num_ranks
        self._all_reduce = kernels.functions("all_reduce", [POINTER, POINTER, INTEGER, INTEGER])
        self._all_gather = kernels.functions("all_gather", [POINTER, POINTER, POINTER, *[INTEGER] * 3])

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of the `x` of all ranks, in its place; contiguous."""
        assert x.is_contiguous()
        self._all_reduce[x.dtype](self._address, x.data_ptr(), x.numel(), torch.get_num_threads())
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """[..., size] of each rank -> [..., ranks * size]."""
        x, size = x.contiguous(), x.shape[-1]
        assert size * x.itemsize <= _SLOT_BYTES
        y = x.new_empty(*x.shape[:-1], self._num_ranks * size)
        rows = x.numel() // size
        self._all_gather[x.dtype](self._address, x.data_ptr(), y.data_ptr(), rows, size, torch.get_num_threads())
        return y
