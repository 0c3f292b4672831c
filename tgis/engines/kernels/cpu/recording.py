"""Recorded passes of a CPU model: between its kernels a small model spends as long in Python as inside of them.

A pass is recorded while it is computed, and replayed in place of later ones whose inputs are in the same tensors, as a
CUDA graph is. Calls of C kernels are kept with their arguments, and one C function repeats them. Operators of PyTorch
are called again, into the same memory, except for those that C kernels do (`aten_kernels.py`), and for views,
which are nothing but addresses.

A pass that consists of C kernels alone can be recorded for any sizes, such as numbers of tokens: see `ResizablePass`.
"""

import copy
import ctypes
import logging
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from tgis.engines.kernels.cpu.aten_kernels import AtenKernels
from tgis.engines.kernels.cpu.library import CpuKernels, call_recorder
from tgis.errors import Unsupported

log = logging.getLogger(__name__)

_MAX_ARGUMENTS = 14  # as in replay.c
_ALIGNMENT = 64  # bytes: a cache line
_UNRECORDABLE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded}
_aten = torch.ops.aten
_EMPTY = {_aten.empty.memory_format, _aten.empty_like.default, _aten.new_empty.default, _aten.empty_strided.default}


class _Call(ctypes.Structure):
    """`recorded_call` of replay.c."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("returns_status", ctypes.c_int64),
        ("arguments", ctypes.c_int64 * _MAX_ARGUMENTS),
    )


class Recorder:
    """Records passes, which share their memory: a replay overwrites the tensors of all others."""

    def __init__(self, kernels: CpuKernels) -> None:
        self._kernels = kernels
        self._memory = _Memory()
        self._is_first = True

    def record(self, run: Callable[[], Tensor]) -> tuple["RecordedPass", Tensor]:
        """The output of the pass, and what computes it anew, in place. Unsupported if the pass depends on numbers that
        are in tensors by more than what operators make of them.
        """
        return self._record(_Recording(self._kernels, self._memory), run)

    def record_resizable(
        self, run: Callable[[tuple[int, ...]], Tensor], largest: tuple[int, ...]
    ) -> tuple["ResizablePass", Tensor]:
        """What computes the pass for any sizes up to the largest, and its output for the largest. No kernel runs, so
        nothing is computed yet. Unsupported if the pass needs operators of PyTorch.
        """
        smaller = [tuple(size - (at == index) for at, size in enumerate(largest)) for index in range(len(largest))]
        probed = tuple(-(-size // 2) for size in largest)
        found, output = self._record(_Recording(self._kernels, self._memory, dry=True), partial(run, largest))
        others = []
        for sizes in (*smaller, probed):
            with self._memory.repeated():
                others.append(self._record(_Recording(self._kernels, self._memory, dry=True), partial(run, sizes))[0])
        *others, probe = others
        return ResizablePass(found, others, largest, (probe, probed)), output

    def _record(self, recording: "_Recording", run: Callable[[], Tensor]) -> tuple["RecordedPass", Tensor]:
        self._memory.start()
        token = call_recorder.set(recording.add_call)
        try:
            with recording:
                output = run()
        finally:
            call_recorder.reset(token)
        recorded = recording.finish()
        if self._is_first:
            names = ", ".join(f"{count} {name}" for name, count in recorded.operators.most_common())
            log.info("operators of PyTorch in a recorded pass: %s", names or "none")
        self._is_first = False
        return recorded, self._memory.borrowed(output)


class KernelCalls:
    """Calls of C kernels, one after the other."""

    def __init__(self, replay: Callable[..., int], calls: list[_Call], names: list[str]) -> None:
        """`names` are the names of the functions."""
        self.names = names
        self._replay = replay
        self.calls: Any = (_Call * len(calls))(*calls)

    def moved_to(self, memory: NDArray[np.int64]) -> Self:
        """Calls that are made as the memory says, which has a copy of these."""
        moved = copy.copy(self)
        moved.calls = type(self.calls).from_buffer(memory)
        return moved

    def __call__(self) -> None:
        if failed := self._replay(self.calls, len(self.names)):
            raise RuntimeError(f"{self.names[failed - 1]} failed, call {failed} of a recorded pass")


@dataclass(slots=True)
class RecordedPass:
    """Repeats a pass when it is called."""

    parts: list[Callable[[], None]] = field(default_factory=list)  # in order
    kept: list[object] = field(default_factory=list)  # whose addresses are in calls
    operators: Counter[str] = field(default_factory=Counter)  # of PyTorch, that are called

    def __call__(self) -> None:
        for part in self.parts:
            part()

    @property
    def kernel_calls(self) -> KernelCalls:
        """All there is to do. Unsupported if there is more than to call kernels."""
        first, *others = self.parts
        if others or not isinstance(first, KernelCalls):
            raise Unsupported("a pass has operators of PyTorch")
        return first

    def words(self, address: int = 0) -> NDArray[np.int64]:
        """Numbers that are to be at this address: all calls, then the structures that they point to."""
        calls = np.frombuffer(self.kernel_calls.calls, np.int64)
        structures = [
            np.frombuffer(memoryview(each), np.int64) for each in self.kept if isinstance(each, ctypes.Structure)
        ]
        starts = accumulate(map(len, structures), initial=len(calls))
        places = {old.ctypes.data: address + 8 * start for old, start in zip(structures, starts, strict=False)}
        return np.concatenate([[places.get(word, word) for word in calls.tolist()], *structures])


class ResizablePass:
    """Repeats a pass that was recorded for some sizes, and for sizes of which one is smaller by 1: what differs between
    the arguments of their calls is linear in that size. The memory is that of the largest sizes.
    """

    def __init__(
        self,
        largest: RecordedPass,
        smaller: list[RecordedPass],
        sizes: tuple[int, ...],
        probe: tuple[RecordedPass, tuple[int, ...]],
    ) -> None:
        """Unsupported unless the pass of the probe, with its sizes, is what the others predict."""
        words, *others = (recorded.words() for recorded in (largest, *smaller))
        if any(len(each) != len(words) for each in others):
            raise Unsupported("a pass has other calls for other sizes")
        factors = np.stack([words - each for each in others], 1)
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


class _Recording(TorchDispatchMode):  # type: ignore[misc]
    """One pass."""

    def __init__(self, kernels: CpuKernels, memory: "_Memory", *, dry: bool = False) -> None:
        """`dry`: kernels do not run."""
        super().__init__()
        self._dry = dry
        self._memory = memory
        self._replay = kernels.function("replay", torch.float32, [ctypes.c_void_p, ctypes.c_int64], ctypes.c_int64)
        self._aten_kernels = AtenKernels(kernels)
        self._calls: list[_Call] = []  # since the last part
        self._names: list[str] = []  # of their functions
        self._recorded = RecordedPass(kept=[memory])

    def add_call(self, function: Any, arguments: tuple[Any, ...]) -> bool:
        """A call of a C kernel; whether it need not be made."""
        self._recorded.kept += [each for each in arguments if isinstance(each, ctypes.Structure)]
        address, returns_status = ctypes.cast(function, ctypes.c_void_p).value, function.restype is not None
        self._calls.append(_Call(address, returns_status, tuple(map(_word, arguments))))
        self._names.append(function.__name__)
        return self._dry

    def finish(self) -> "RecordedPass":
        self._end_calls()
        return self._recorded

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep torch from importing dynamo to find out."""
        return False

    def __torch_dispatch__(
        self, operator: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if operator is _aten.detach_.default or (operator is _aten.dropout.default and not args[2]):
            return args[0]  # they do nothing in inference
        if _UNRECORDABLE.intersection(operator.tags) and not _indexes_by_number(operator, args):
            raise Unsupported(f"{operator} cannot be recorded")
        if operator in _EMPTY:
            return self._memory.empty(operator(*args, **kwargs))
        if operator is _aten.lift_fresh.default:
            return self._memory.constant(args[0])
        if operator is _aten.add_.Tensor:
            args = args[0], self.__torch_dispatch__(_aten.add.Tensor, types, args, kwargs)
            operator, kwargs = _aten.copy_.default, {}
        if operator is _aten.copy_.default and self._copy(args[1], args[0]):
            return args[0]
        found = operator(*args, **kwargs)
        if (made := self._run_kernels(operator, args, kwargs, found)) is not None:
            return made
        return self._run_operator(operator, args, kwargs, found)

    def _run_kernels(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], found: Any) -> Tensor | None:
        """What C kernels write in place of `found`; None unless they do, and with the same bits."""
        inputs, count = _tensors((args, kwargs)), len(self._calls)
        if operator._schema.is_mutable or not isinstance(found, Tensor) or _address(found) is None:
            return None
        if not found.is_contiguous() or not found.numel() or _address(found) in map(_address, inputs):
            return None
        y = self._memory.empty(found)
        if not inputs:
            flat = found.flatten()
            is_uniform = torch.equal(flat[:1].expand_as(flat), flat)  # such constants may have any size
            inputs = [self._memory.constant(flat[:1] if is_uniform else flat).expand_as(flat)]
            operator, args, kwargs = _aten.clone.default, (*inputs,), {}
        launched = self._aten_kernels.launch(operator, args, kwargs, y)
        if self._dry:
            y.copy_(found)
        if not launched or not torch.equal(y.nan_to_num(), found.nan_to_num()):  # PyTorch may round in another way
            del self._calls[count:], self._names[count:]
            return None
        self._recorded.kept += [each for each in inputs if each not in self._memory]
        return y

    def _copy(self, source: Tensor, target: Tensor) -> bool:
        """Let a kernel copy; False if there is none."""
        same_shape = source.shape == target.shape
        if not same_shape or not self._aten_kernels.launch(_aten.clone.default, (source,), {}, target):
            return False
        if self._dry:
            target.copy_(source)
        self._recorded.kept += [each for each in (source, target) if each not in self._memory]
        return True

    def _run_operator(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], found: Any) -> Any:
        inputs, outputs = _tensors((args, kwargs)), _tensors(found)
        mutable = operator._schema.is_mutable
        if not outputs and not mutable:
            raise Unsupported(f"{operator} tells the host what is in a tensor")
        if any(_address(each) is None for each in outputs):
            raise Unsupported(f"{operator} gives a tensor without an address")
        self._recorded.kept += [each for each in (*inputs, *outputs) if each not in self._memory]
        addresses = {_address(each) for each in inputs}
        is_view = all(_address(each) in addresses for each in outputs)
        if is_view and not mutable:
            return found
        self._recorded.operators[str(operator)] += 1
        args, kwargs = tree_map_only(Tensor, self._memory.borrowed, (args, kwargs))
        if is_view:
            self._add_part(lambda: operator(*args, **kwargs))
            return found
        results = tree_map_only(Tensor, self._memory.copied, found)
        targets = [self._memory.borrowed(each) for each in _tensors(results)]
        self._add_part(partial(_run_into, targets, operator, args, kwargs))
        return results

    def _add_part(self, part: Callable[[], None]) -> None:
        self._end_calls()
        self._recorded.parts.append(part)

    def _end_calls(self) -> None:
        if self._calls:
            self._recorded.parts.append(KernelCalls(self._replay, self._calls, self._names))
            self._calls, self._names = [], []


class _Memory:
    """Tensors whose memory outlives them: a later one gets it, but nobody else does."""

    def __init__(self) -> None:
        self._free: defaultdict[int, list[NDArray[np.uint8]]] = defaultdict(list)  # by size
        self._blocks: dict[int, NDArray[np.uint8]] = {}  # all there are, by address
        self._constants: dict[tuple[object, ...], Tensor] = {}  # by what they are
        self._taken: list[NDArray[np.uint8]] = []  # in the last recording, in order
        self._used: list[Tensor] = []  # constants, likewise
        self._repeated: deque[NDArray[np.uint8]] | None = None
        self._reused: deque[Tensor] = deque()

    def __contains__(self, x: Tensor) -> bool:
        return _address(x) in self._blocks

    def empty(self, like: Tensor) -> Tensor:
        """A tensor of the same dtype, shape and strides."""
        if self._repeated is None:
            lease = self._lease(1 << max(like.untyped_storage().nbytes() - 1, _ALIGNMENT - 1).bit_length())
        elif self._repeated:
            lease = self._repeated.popleft()
        else:
            raise Unsupported("a pass has other calls for other sizes")
        return torch.frombuffer(lease, dtype=like.dtype).as_strided(like.shape, like.stride(), like.storage_offset())

    def _lease(self, size: int) -> NDArray[np.uint8]:
        block = self._free[size].pop() if self._free[size] else self._new_block(size)
        self._taken.append(block)
        lease = block[:]  # dies with the tensor and its views
        weakref.finalize(lease, self._free[size].append, block)
        return lease

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
        """A tensor of the same numbers, which is the same in all recordings; for smaller sizes the beginning of one."""
        if self._repeated is None:
            key = x.dtype, x.shape, x.flatten().view(torch.uint8).numpy().tobytes()
            self._used.append(self._constants.setdefault(key, x))
            return self._used[-1]
        known = self._reused.popleft().flatten()[: x.numel()] if self._reused else x[:0]
        if known.dtype != x.dtype or not torch.equal(known, x.flatten()):
            raise Unsupported("a pass has other constants for other sizes")
        return known.view(x.shape)

    def copied(self, x: Tensor) -> Tensor:
        return self.empty(x).copy_(x)

    def borrowed(self, x: Tensor) -> Tensor:
        """A view that does not keep its pool block alive; a tensor of other memory is returned itself."""
        address = _address(x)
        if address not in self._blocks:
            return x
        block = torch.from_numpy(self._blocks[address])
        return block.view(x.dtype).as_strided(x.shape, x.stride(), x.storage_offset())

    def _new_block(self, size: int) -> NDArray[np.uint8]:
        whole = np.zeros(size + _ALIGNMENT, np.uint8)
        start = -whole.ctypes.data % _ALIGNMENT
        block = whole[start : start + size]
        self._blocks[block.ctypes.data] = block
        return block


def _tensors(tree: Any) -> list[Tensor]:
    return [each for each in tree_leaves(tree) if isinstance(each, Tensor)]


def _indexes_by_number(operator: Any, args: tuple[Any, ...]) -> bool:
    """The result has another size for each mask, but not for each set of numbers."""
    return operator is _aten.index.Tensor and all(each is None or each.dtype == torch.int64 for each in args[1])


def _word(argument: Any) -> int:
    """An argument of a C kernel as it is passed in a register."""
    if isinstance(argument, ctypes.Structure):
        return ctypes.addressof(argument)
    assert argument is None or isinstance(argument, int), argument
    return argument or 0


def _address(x: Tensor) -> int | None:
    """The address of a tensor's memory; None if it has none, such as a weight that oneDNN has packed."""
    return x.untyped_storage().data_ptr() if x.layout == torch.strided else None


def _run_into(targets: list[Tensor], operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for target, each in zip(targets, _tensors(operator(*args, **kwargs)), strict=True):
        target.copy_(each)
