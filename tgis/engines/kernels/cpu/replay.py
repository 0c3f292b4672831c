"""Replays of recorded passes: calls of C kernels with the arguments that they had, and operators of PyTorch."""

import copy
import ctypes
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from tgis.errors import Unsupported

MAX_ARGUMENTS = 14  # as in replay.c


class KernelCall(ctypes.Structure):
    """`recorded_call` of replay.c."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("returns_status", ctypes.c_int64),
        ("arguments", ctypes.c_int64 * MAX_ARGUMENTS),
    )

    @classmethod
    def of(cls, function: Any, arguments: tuple[Any, ...]) -> "KernelCall":
        address, returns_status = ctypes.cast(function, ctypes.c_void_p).value, function.restype is not None
        return cls(address, returns_status, tuple(map(_register, arguments)))


class KernelCalls:
    """Calls of C kernels, one after the other."""

    def __init__(self, replay: Callable[..., int], calls: list[KernelCall], names: list[str]) -> None:
        """`names` are the names of the functions."""
        self._replay = replay
        self.calls: Any = (KernelCall * len(calls))(*calls)
        self._names = names

    def moved_to(self, memory: NDArray[np.int64]) -> Self:
        """Calls that are made as the memory says, which begins with a copy of these."""
        moved = copy.copy(self)
        moved.calls = type(self.calls).from_buffer(memory)
        return moved

    def __call__(self) -> None:
        if failed := self._replay(self.calls, len(self._names)):
            raise RuntimeError(f"{self._names[failed - 1]} failed, call {failed} of a recorded pass")


@dataclass(slots=True)
class RecordedPass:
    """Repeats a pass when it is called."""

    parts: list[Callable[[], None]] = field(default_factory=list)  # in order
    kept: list[object] = field(default_factory=list)  # objects whose addresses are in the calls
    operators: Counter[str] = field(default_factory=Counter)  # of PyTorch, that are called

    def __call__(self) -> None:
        for part in self.parts:
            part()

    @property
    def kernel_calls(self) -> KernelCalls:
        """The only part. Unsupported if there is more than calls of kernels."""
        first, *more = self.parts
        if more or not isinstance(first, KernelCalls):
            raise Unsupported("a pass has operators of PyTorch")
        return first

    def words(self, address: int = 0) -> NDArray[np.int64]:
        """All calls, then the structures that they point to, as they would be at this address."""
        calls = np.frombuffer(self.kernel_calls.calls, np.int64)
        structures = [np.frombuffer(memoryview(x), np.int64) for x in self.kept if isinstance(x, ctypes.Structure)]
        starts = accumulate(map(len, structures), initial=len(calls))
        moved = {old.ctypes.data: address + 8 * start for old, start in zip(structures, starts, strict=False)}
        return np.concatenate([[moved.get(word, word) for word in calls.tolist()], *structures])


class ResizablePass:
    """Repeats a pass for any sizes, such as numbers of tokens, up to those that it was recorded for. It was also
    recorded with each size smaller by 1: arguments that differ are linear in that size. The memory stays the same.
    """

    def __init__(
        self,
        largest: RecordedPass,
        smaller: list[RecordedPass],
        sizes: tuple[int, ...],
        probe: tuple[RecordedPass, tuple[int, ...]],
    ) -> None:
        """Unsupported unless the pass of the probe, with its sizes, is what the others predict."""
        words, *fewer = (recorded.words() for recorded in (largest, *smaller))
        if any(len(other) != len(words) for other in fewer):
            raise Unsupported("a pass has other calls for other sizes")
        factors = np.stack([words - other for other in fewer], 1)
        self._moving = np.flatnonzero(factors.any(1))
        self._factors = factors[self._moving]
        self._fixed = words[self._moving] - self._factors @ sizes
        predicted, (probed, probed_sizes) = words.copy(), probe
        predicted[self._moving] = self._fixed + self._factors @ probed_sizes
        if not np.array_equal(predicted, probed.words()):
            raise Unsupported("a pass has other calls for other sizes")
        self._words = words.copy()
        self._words[:] = largest.words(self._words.ctypes.data)
        self._run, self._kept = largest.kernel_calls.moved_to(self._words), largest.kept

    def __call__(self, sizes: tuple[int, ...]) -> None:
        self._words[self._moving] = self._fixed + self._factors @ sizes
        self._run()


def _register(argument: Any) -> int:
    """An argument of a C kernel as it is passed in a register."""
    if isinstance(argument, ctypes.Structure):
        return ctypes.addressof(argument)
    assert argument is None or isinstance(argument, int), argument
    return argument or 0
