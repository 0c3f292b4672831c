"""Norms as kernels of elementwise.c."""

import copy
import ctypes
from dataclasses import dataclass
from inspect import signature

import torch
from torch import Tensor, nn

from tgis.engines.kernels.cpu.library import DTYPES, FLOAT, INTEGER, POINTER, CpuKernels, structure
from tgis.engines.kernels.cpu.probes import is_special, rows_close

_DEFAULT_EPS = 1e-5  # eps of norms that have no attribute for it


@dataclass(frozen=True, slots=True)
class NormFormula:
    """(x - mean(x)) / sqrt(variance(x) + eps) * (weight + offset) + bias; an RMS norm takes the mean to be 0."""

    eps: float
    offset: float = 0.0
    centered: bool = False

    def __call__(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        x = x - x.mean(-1, keepdim=True) if self.centered else x
        y = x * (x.pow(2).mean(-1, keepdim=True) + self.eps).rsqrt()
        y = y if weight is None else y * (weight + self.offset)
        return y if bias is None else y + bias


# `norm_params` of elementwise.c.
_NormParams = structure(("weight bias", POINTER), ("size is_centered", INTEGER), ("weight_offset eps", FLOAT))


class Norm(nn.Module):  # type: ignore[misc]
    """A norm over the last dimension, as the module `plain` computes it."""

    runs_cpu_kernel = True

    def __init__(self, plain: nn.Module, formula: NormFormula, kernels: CpuKernels) -> None:
        super().__init__()
        argtypes = [ctypes.POINTER(_NormParams), POINTER, POINTER, *[INTEGER] * 5]
        self.weight, self.bias = _weight_and_bias(plain)
        self._plain = plain.forward
        functions = kernels.functions("norm", argtypes)
        self._functions = functions if self.weight is None else {self.weight.dtype: functions[self.weight.dtype]}
        self._size = _norm_size(plain)
        pointers = (None if x is None else x.data_ptr() for x in (self.weight, self.bias))
        self._params = _NormParams(*pointers, self._size, formula.centered, formula.offset, formula.eps)

    def forward(self, x: Tensor) -> Tensor:  # [..., size] -> the same
        if x.dtype not in self._functions:  # some models add up in float32
            return self._plain(x)
        assert x.shape[-1] == self._size, x.shape
        y = x.new_empty(x.shape)
        rows = x.view(1, -1, self._size) if x.is_contiguous() else x[None].flatten(0, -3)  # [outer, inner, size]
        if rows.stride(2) != 1:
            rows = rows.contiguous()
        layout = *rows.shape[:2], *rows.stride()[:2]
        self._functions[x.dtype](self._params, rows.data_ptr(), y.data_ptr(), *layout, torch.get_num_threads())
        return y


def as_norm(module: nn.Module, kernels: CpuKernels) -> Norm | None:
    """A replacement for the module, if that is a norm."""
    size, dtypes = _norm_size(module), {parameter.dtype for parameter in module.parameters()}
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", _DEFAULT_EPS))
    is_gated = len(signature(type(module).forward).parameters) > 2
    if is_gated or not size or len(dtypes) > 1 or not dtypes.issubset(DTYPES) or not isinstance(eps, float):
        return None
    formulas = (NormFormula(eps, offset, centered) for offset in (0.0, 1.0) for centered in (False, True))
    formula = next((formula for formula in formulas if _computes_norm(module, size, formula)), None)
    return None if formula is None else Norm(module, formula, kernels)


def _computes_norm(module: nn.Module, size: int, formula: NormFormula) -> bool:
    """Compare with the formula, also where the mean is not 0 and where numbers are so small that eps matters."""
    module = copy.deepcopy(module).float()
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data = torch.randn(size, generator=generator)
    x = torch.randn(1, 3, size, generator=generator) + 1
    x *= torch.tensor([[1.0], [30.0], [formula.eps**0.5]])
    return rows_close(formula(x, *_weight_and_bias(module)), module(x))


def _weight_and_bias(module: nn.Module) -> tuple[Tensor | None, Tensor | None]:
    return getattr(module, "weight", None), getattr(module, "bias", None)


def _norm_size(module: nn.Module) -> int:
    """The size of the last dimension; 0 if the module does not look like a norm of one dimension."""
    parameters = dict(module.named_parameters())
    if parameters.keys() - {"weight", "bias"}:
        return 0
    shapes = {tuple(parameter.shape) for parameter in parameters.values()}
    if "weight" not in parameters:  # many modules have a bias
        shapes.add(tuple(getattr(module, "normalized_shape", ())))
    shape = shapes.pop()
    return int(shape[0]) if len(shape) == 1 and not shapes and not is_special(module) else 0
