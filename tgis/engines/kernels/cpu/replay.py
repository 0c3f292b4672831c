"""Replays of recorded passes: calls of C kernels with the arguments that they had, and operators of PyTorch."""

import ctypes
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tgis.errors import Unsupported

_MAX_ARGUMENTS = 14  # same value in replay.c


class KernelCalls:
    """Calls of C kernels, one after the other."""

    def __init__(self, replay: Callable[..., int], words: NDArray[np.int64], names: list[str]) -> None:
        """`words` begin with a `call_words` for each name of a function; they may be changed later."""
        self.replay, self.words, self.names = replay, words, names
        self._address = words.ctypes.data

    def __call__(self) -> None:
        if failed := self.replay(self._address, len(self.names)):
            raise RuntimeError(f"{self.names[failed - 1]} failed, call {failed} of a recorded pass")


@dataclass(slots=True)
class RecordedPass:
    """Repeats a pass when it is called."""

    parts: list[Callable[[], None]] = field(default_factory=list)  # segments in the order of execution
    kept: list[object] = field(default_factory=list)  # objects whose addresses are in the calls
    operators: Counter[str] = field(default_factory=Counter)  # PyTorch operators that are called

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
        calls = self.kernel_calls.words
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
        calls, self._kept = largest.kernel_calls, largest.kept
        self._run = KernelCalls(calls.replay, self._words, calls.names)

    def __call__(self, sizes: tuple[int, ...]) -> None:
        self._words[self._moving] = self._fixed + self._factors @ sizes
        self._run()


def call_words(function: Any, arguments: tuple[Any, ...]) -> list[int]:
    """`recorded_call` of replay.c: the function, whether it returns a status, and its arguments as they are passed in
    registers.
    """
    address, returns_status = ctypes.cast(function, ctypes.c_void_p).value, function.restype is not None
    assert address
    assert len(arguments) <= _MAX_ARGUMENTS
    unused = [0] * (_MAX_ARGUMENTS - len(arguments))
    return [address, int(returns_status), *map(_register, arguments), *unused]


def _register(argument: Any) -> int:
    """An argument of a C kernel as it is passed in a register."""
    if isinstance(argument, ctypes.Structure):
        return ctypes.addressof(argument)
    assert argument is None or isinstance(argument, int), argument
    return argument or 0
