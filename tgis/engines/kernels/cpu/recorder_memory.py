"""The memory of recorded passes."""

import mmap
import weakref
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tgis.errors import Unsupported

_MIN_BLOCK_BYTES = 64  # a cache line


class RecorderMemory:
    """Tensors whose memory outlives them: a later tensor of the recorder gets it, but nothing else does."""

    def __init__(self) -> None:
        self._free: defaultdict[int, list[NDArray[np.uint8]]] = defaultdict(list)  # free buffers by size
        self._blocks: dict[int, NDArray[np.uint8]] = {}  # free or not, by address
        self._constants: dict[tuple[object, ...], Tensor] = {}
        self._taken: list[NDArray[np.uint8]] = []  # blocks of the last recording, in order
        self._used: list[Tensor] = []  # constants of the last recording, in order
        self._repeated: deque[NDArray[np.uint8]] | None = None
        self._reused: deque[Tensor] = deque()

    def __contains__(self, x: Tensor) -> bool:
        return address_of(x) in self._blocks

    def empty(self, like: Tensor) -> Tensor:
        """A tensor of the same dtype, shape and strides."""
        if self._repeated is None:
            lease = self._lease(1 << max(like.untyped_storage().nbytes() - 1, _MIN_BLOCK_BYTES - 1).bit_length())
        elif self._repeated:
            lease = self._repeated.popleft()
        else:
            raise Unsupported("a pass has other calls for other sizes")
        return torch.frombuffer(lease, dtype=like.dtype).as_strided(like.shape, like.stride(), like.storage_offset())

    def start(self) -> None:
        """A recording begins."""
        if self._repeated is None:
            self._taken, self._used = [], []

    @contextmanager
    def repeated(self) -> Iterator[None]:
        """Tensors get the memory of the last recording, one after the other, and so do constants."""
        self._repeated, self._reused = deque(self._taken), deque(self._used)
        try:
            yield
        finally:
            self._repeated = None

    def constant(self, x: Tensor) -> Tensor:
        """A tensor of the same numbers, which all recordings share; for smaller sizes the beginning of one."""
        if self._repeated is None:
            key = x.dtype, x.shape, x.flatten().view(torch.uint8).numpy().tobytes()
            self._used.append(self._constants.setdefault(key, x))
            return self._used[-1]
        known = self._reused.popleft().flatten()[: x.numel()] if self._reused else x[:0]
        if known.dtype != x.dtype or not torch.equal(known, x.flatten()):
            raise Unsupported("a pass has other constants for other sizes")
        return known.view(x.shape)

    def borrowed(self, x: Tensor) -> Tensor:
        """A view that does not keep its block from being reused; a tensor of other memory is returned itself."""
        block = self._blocks.get(address_of(x) or 0)
        if block is None:
            return x
        return torch.from_numpy(block).view(x.dtype).as_strided(x.shape, x.stride(), x.storage_offset())

    def _lease(self, size: int) -> NDArray[np.uint8]:
        block = self._free[size].pop() if self._free[size] else self._new_block(size)
        self._taken.append(block)
        lease = block[:]  # dies with the tensor and its views
        weakref.finalize(lease, self._free[size].append, block)
        return lease

    def _new_block(self, size: int) -> NDArray[np.uint8]:
        """Zeros that take memory when they are first written: few prompts are as long as the longest."""
        block = np.frombuffer(mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
        self._blocks[block.ctypes.data] = block
        return block


def address_of(x: Tensor) -> int | None:
    """The address of a tensor's memory; None if it has none, such as a weight that oneDNN has packed."""
    return x.untyped_storage().data_ptr() if x.layout == torch.strided else None
