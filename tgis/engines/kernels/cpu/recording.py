"""Recorded passes of a CPU model: between its kernels a small model spends as long in Python as inside of them.

A pass is recorded while it is computed, and replayed in place of later ones whose inputs are in the same tensors, as a
CUDA graph is. Calls of C kernels are kept with their arguments, and one C function repeats them. Operators of PyTorch
are called again, into the same memory, except for those that C kernels do (`aten_kernels.py`), and for views,
which are nothing but addresses. A pass of C kernels alone can be recorded for any number of tokens (ResizablePass).
"""

import ctypes
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from tgis.engines.kernels.cpu.aten_kernels import AtenKernels
from tgis.engines.kernels.cpu.library import CpuKernels, call_recorder
from tgis.engines.kernels.cpu.recorder_memory import RecorderMemory, address_of
from tgis.engines.kernels.cpu.replay import KernelCalls, RecordedPass, ResizablePass, call_words
from tgis.errors import Unsupported

log = logging.getLogger(__name__)

_UNRECORDABLE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded}
_aten = torch.ops.aten
_EMPTY = {_aten.empty.memory_format, _aten.empty_like.default, _aten.new_empty.default, _aten.empty_strided.default}


class Recorder:
    """Records passes, which share their memory: a replay overwrites the tensors of all others."""

    def __init__(self, kernels: CpuKernels) -> None:
        self._kernels = kernels
        self._memory = RecorderMemory()
        self._is_first = True

    def record(self, run: Callable[[], Tensor]) -> tuple[RecordedPass, Tensor]:
        """The pass that repeats `run` in place, and its output. Unsupported if the host reads what is in tensors."""
        return self._record(_Recording(self._kernels, self._memory), run)

    def record_resizable(
        self, run: Callable[[tuple[int, ...]], Tensor], largest: tuple[int, ...]
    ) -> tuple[ResizablePass, Tensor]:
        """The pass that repeats `run` for any sizes up to the largest, and its output for the largest. No kernel runs,
        so nothing is computed yet. Unsupported if the pass needs operators of PyTorch.
        """
        smaller = [tuple(size - (at == index) for at, size in enumerate(largest)) for index in range(len(largest))]
        probed = tuple(-(-size // 2) for size in largest)
        recorded, output = self._record(_Recording(self._kernels, self._memory, dry=True), partial(run, largest))
        passes = []
        for sizes in (*smaller, probed):
            with self._memory.repeated():
                passes.append(self._record(_Recording(self._kernels, self._memory, dry=True), partial(run, sizes))[0])
        *fewer, probe = passes
        return ResizablePass(recorded, fewer, largest, (probe, probed)), output

    def _record(self, recording: "_Recording", run: Callable[[], Tensor]) -> tuple[RecordedPass, Tensor]:
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
            log.debug("operators of PyTorch in a recorded pass: %s", names or "none")
        self._is_first = False
        return recorded, self._memory.borrowed(output)


class _Recording(TorchDispatchMode):  # type: ignore[misc]
    """One pass."""

    def __init__(self, kernels: CpuKernels, memory: RecorderMemory, *, dry: bool = False) -> None:
        """`dry`: kernels do not run."""
        super().__init__()
        self._dry = dry
        self._memory = memory
        self._replay = kernels.function("replay", torch.float32, [ctypes.c_void_p, ctypes.c_int64], ctypes.c_int64)
        self._aten_kernels = AtenKernels(kernels)
        self._calls: list[list[int]] = []  # since the last part
        self._names: list[str] = []  # function names
        self._recorded = RecordedPass(kept=[memory])

    def add_call(self, function: Any, arguments: tuple[Any, ...]) -> bool:
        """Record a call of a C kernel; whether it need not be made."""
        self._recorded.kept += [argument for argument in arguments if isinstance(argument, ctypes.Structure)]
        self._calls.append(call_words(function, arguments))
        self._names.append(function.__name__)
        return self._dry

    def finish(self) -> RecordedPass:
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
        result = operator(*args, **kwargs)
        if (written := self._run_kernels(operator, args, kwargs, result)) is not None:
            return written
        return self._run_operator(operator, args, kwargs, result)

    def _run_kernels(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Tensor | None:
        """The output of C kernels in place of `result`; None unless there are any, and they give the same bits."""
        inputs, count = _tensors((args, kwargs)), len(self._calls)
        if operator._schema.is_mutable or not isinstance(result, Tensor) or address_of(result) is None:
            return None
        if not result.is_contiguous() or not result.numel() or address_of(result) in map(address_of, inputs):
            return None
        y = self._memory.empty(result)
        if not inputs:
            flat = result.flatten()
            is_uniform = torch.equal(flat[:1].expand_as(flat), flat)  # such constants may have any size
            inputs = [self._memory.constant(flat[:1] if is_uniform else flat).expand_as(flat)]
            operator, args, kwargs = _aten.clone.default, (*inputs,), {}
        launched = self._aten_kernels.launch(operator, args, kwargs, y)
        if self._dry:
            y.copy_(result)
        if not launched or not torch.equal(y.nan_to_num(), result.nan_to_num()):  # PyTorch may round in another way
            del self._calls[count:], self._names[count:]
            return None
        self._keep(inputs)
        return y

    def _copy(self, source: Tensor, target: Tensor) -> bool:
        """Let a kernel copy; False if there is none."""
        same_shape = source.shape == target.shape
        if not same_shape or not self._aten_kernels.launch(_aten.clone.default, (source,), {}, target):
            return False
        if self._dry:
            target.copy_(source)
        self._keep([source, target])
        return True

    def _run_operator(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        inputs, outputs = _tensors((args, kwargs)), _tensors(result)
        mutable = operator._schema.is_mutable
        if not outputs and not mutable:
            raise Unsupported(f"{operator} tells the host what is in a tensor")
        if None in map(address_of, outputs):
            raise Unsupported(f"{operator} gives a tensor without an address")
        self._keep(inputs + outputs)
        is_view = {*map(address_of, outputs)} <= {*map(address_of, inputs)}
        if is_view and not mutable:
            return result
        self._recorded.operators[str(operator)] += 1
        args, kwargs = tree_map_only(Tensor, self._memory.borrowed, (args, kwargs))
        if is_view:
            self._add_part(lambda: operator(*args, **kwargs))
            return result
        results = tree_map_only(Tensor, lambda x: self._memory.empty(x).copy_(x), result)
        targets = [self._memory.borrowed(x) for x in _tensors(results)]
        self._add_part(partial(_run_into, targets, operator, args, kwargs))
        return results

    def _keep(self, tensors: list[Tensor]) -> None:
        """Keep the memory of tensors that is not the recorder's."""
        self._recorded.kept += [x for x in tensors if x not in self._memory]

    def _add_part(self, part: Callable[[], None]) -> None:
        self._end_calls()
        self._recorded.parts.append(part)

    def _end_calls(self) -> None:
        if self._calls:
            words = np.array(self._calls, np.int64).ravel()
            self._recorded.parts.append(KernelCalls(self._replay, words, self._names))
            self._calls, self._names = [], []


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _indexes_by_number(operator: Any, args: tuple[Any, ...]) -> bool:
    """The result has another size for each mask, but not for each set of numbers."""
    return operator is _aten.index.Tensor and all(index is None or index.dtype == torch.int64 for index in args[1])


def _run_into(targets: list[Tensor], operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for target, result in zip(targets, _tensors(operator(*args, **kwargs)), strict=True):
        target.copy_(result)
