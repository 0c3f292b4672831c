"""Operators of PyTorch as kernels in C: what models do between their layers, in steps that are recorded.

They give the same bits as PyTorch, which computes the steps that are not recorded: the recorder compares.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from tgis.engines.kernels.cpu.library import DTYPES, CpuKernels

_aten = torch.ops.aten
_ARITHMETIC = {  # functions of elementwise.c
    _aten.add.Tensor: "add",
    _aten.sub.Tensor: "subtract",
    _aten.mul.Tensor: "multiply",
    _aten.div.Tensor: "divide",
}
_ROUNDING = {_aten.add.Tensor, _aten.sub.Tensor}  # numbers, to the dtype of tensors
_COPIES = {_aten.clone.default, _aten.contiguous.default, _aten.reshape.default, _aten.flatten.using_ints}
_JOINS: dict[Any, Callable[[Tensor, list[Tensor], int], tuple[Tensor, ...]]] = {  # the places of the parts
    _aten.cat.default: lambda y, parts, dim: y.split([part.shape[dim] for part in parts], dim),
    _aten.stack.default: lambda y, _, dim: y.unbind(dim),
}
_MAX_DIMS = 4  # same value in elementwise.c
_Layout = list[tuple[int, ...]]  # size and strides by dimension, shared by tensors of one shape


class _StridedParams(ctypes.Structure):
    """`strided_params` of elementwise.c."""

    _fields_ = (
        *((name, ctypes.c_int64 * _MAX_DIMS) for name in ("sizes", "a_strides", "b_strides")),
        ("scalar", ctypes.c_float),
    )

    @classmethod
    def of(cls, layout: _Layout, scalar: float = 0.0) -> Self:
        """The parameters for two tensors whose last dimensions are these."""
        assert len(layout) <= _MAX_DIMS
        missing = [(1, 0, 0)] * (_MAX_DIMS - len(layout))
        return cls(*zip(*missing, *layout, strict=True), scalar)


class AtenKernels:
    """The operators that there are kernels for."""

    def __init__(self, kernels: CpuKernels) -> None:
        argtypes = [ctypes.POINTER(_StridedParams), *[ctypes.c_void_p] * 3, ctypes.c_int64]
        self._functions = {operator: kernels.functions(name, argtypes) for operator, name in _ARITHMETIC.items()}
        self._add_integer = kernels.function(
            "add_integer", torch.float32, [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64]
        )
        self._copy_function = kernels.function("copy", torch.float32, argtypes[:3])
        rows_argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int64] * 4
        self._read_rows = kernels.functions("packed_rows", rows_argtypes, ctypes.c_int)

    def launch(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], y: Tensor) -> bool:
        """Let kernels write to `y` what the operator gives, contiguous; False if there are none for these arguments."""
        if operator is _aten.embedding.default:
            return self._embedding(args[0], args[1], y)
        if operator is _aten.index.Tensor and _selects_tokens(*args):
            return self._embedding(args[0][0], args[1][1], y)
        if operator in _COPIES:
            return self._copies(args[:1], [y.view(args[0].shape)])
        if operator in _JOINS:
            dim = args[1] if len(args) > 1 else 0
            return self._copies(args[0], _JOINS[operator](y, args[0], dim))
        if operator is _aten.neg.default:
            return self._arithmetic(_aten.mul.Tensor, args[0], -1, y)
        return operator in _ARITHMETIC and not kwargs and self._arithmetic(operator, args[0], args[1], y)

    def _embedding(self, table: Tensor, ids: Tensor, y: Tensor) -> bool:
        plain: bool = table.is_contiguous() and ids.is_contiguous() and ids.dtype == torch.int64
        rows, dtype = len(table), table.dtype if table.dtype in DTYPES else torch.float32  # others are copied as bits
        pointers, size = (table.data_ptr(), ids.data_ptr(), y.data_ptr()), table.nbytes // rows // dtype.itemsize
        return plain and not self._read_rows[dtype](*pointers, ids.numel(), size, rows, 1)

    def _copies(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> bool:
        """Copy each source to its target; False if one has too many dimensions or another dtype or shape."""
        for a, y in zip(sources, targets, strict=True):
            strides = [[stride * a.itemsize for stride in x.stride()] for x in (a, y)]
            layout = _merged([*zip(a.shape, *strides, strict=True), (a.itemsize, 1, 1)])
            if len(layout) > _MAX_DIMS or a.dtype != y.dtype or a.shape != y.shape:
                return False
            self._copy_function(_StridedParams.of(layout), a.data_ptr(), y.data_ptr())
        return True

    def _arithmetic(self, operator: Any, a: Tensor, b: Tensor | float, y: Tensor) -> bool:
        if operator is _aten.add.Tensor and a.dtype == y.dtype == torch.int64 and isinstance(b, int):
            if fits := a.is_contiguous():
                self._add_integer(a.data_ptr(), b, y.data_ptr(), y.numel())
            return fits
        tensors = [x for x in (a, b) if isinstance(x, Tensor)]
        if y.dtype not in DTYPES or any(x.dtype != y.dtype for x in tensors):
            return False
        strides = [x.expand(y.shape).stride() for x in tensors]
        layout = _merged([*zip(y.shape, *strides, *[(0,) * y.ndim] * (2 - len(strides)), strict=True)])
        if len(layout) > _MAX_DIMS:
            return False
        pointer = b.data_ptr() if isinstance(b, Tensor) else None
        if operator in _ROUNDING and not isinstance(b, Tensor):
            b = torch.tensor(b, dtype=y.dtype).item()
        params = _StridedParams.of(layout, 0.0 if isinstance(b, Tensor) else b)
        self._functions[operator][y.dtype](params, a.data_ptr(), pointer, y.data_ptr(), torch.get_num_threads())
        return True


def _selects_tokens(states: Tensor, indices: list[Tensor | None]) -> bool:
    """Whether the operator gives states [1, tokens, size][:, indices]."""
    return states.ndim == 3 and len(states) == 1 and len(indices) == 2 and indices[0] is None


def _merged(layout: _Layout) -> _Layout:
    """The layout with fewer dimensions: those that are contiguous in all tensors are one."""
    merged: _Layout = []
    for size, *strides in layout:
        if merged and merged[-1][1:] == tuple(size * stride for stride in strides):
            merged[-1] = (merged[-1][0] * size, *strides)
        elif merged and merged[-1][0] == 1:
            merged[-1] = (size, *strides)
        else:
            merged.append((size, *strides))
    return merged
