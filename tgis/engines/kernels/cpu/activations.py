"""Activations and gated MLPs as kernels of elementwise.c.

PyTorch's activations do not serve: vectors and the rest of a tensor may round differently there, so that bits depend on
the number of rows.
"""

import copy
import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, relu, silu, softplus
from torch.overrides import TorchFunctionMode

from tgis.engines.kernels.cpu.gemm import CpuGemm
from tgis.engines.kernels.cpu.library import DTYPES, CpuKernels
from tgis.engines.kernels.cpu.probes import inputs_of_all_sizes, is_special, rows_close

_GATED_MLPS = ("gate_proj", "up_proj", "down_proj"), ("wi_0", "wi_1", "wo")  # the projections; the second ones are T5's

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {  # same order in elementwise.c
    "silu": silu,
    "gelu_tanh": partial(gelu, approximate="tanh"),
    "gelu": gelu,
    "relu": relu,
    "relu2": lambda x: relu(x).square(),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "exp": torch.exp,
    "softplus": softplus,
}

_FUNCTIONS: dict[Any, str] = {getattr(x, name): name for x in (torch, Tensor) for name in ("exp", "sigmoid", "tanh")}
_FUNCTIONS |= {silu: "silu", softplus: "softplus"}


class Activation(nn.Module):  # type: ignore[misc]
    """An activation, as `plain` computes it."""

    runs_cpu_kernel = True

    def __init__(self, plain: Callable[[Tensor], Tensor], name: str, kernels: CpuKernels) -> None:
        super().__init__()
        argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int64] * 6
        self._plain = plain
        self._functions = kernels.functions("activation", argtypes)
        self._kind = list(ACTIVATIONS).index(name)

    def forward(self, x: Tensor) -> Tensor:  # [..., size] -> the same
        return self._run(x, None) if x.dtype in DTYPES and x.ndim > 0 else self._plain(x)

    def _run(self, x: Tensor, factor: Tensor | None) -> Tensor:
        """The activation times a factor, whose last dimension is contiguous."""
        rows = x.reshape(-1, x.shape[-1])  # also the rows of `factor`
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        y = torch.empty(x.shape, dtype=x.dtype)
        pointers = rows.data_ptr(), None if factor is None else factor.data_ptr(), y.data_ptr()
        strides = rows.stride(0), 0 if factor is None else factor.stride(-2)
        self._functions[x.dtype](*pointers, *rows.shape, *strides, self._kind, torch.get_num_threads())
        return y


class GatedMlp(Activation):
    """down_proj(activation(gate_proj(x)) * up_proj(x)), as the module `plain` computes it, whose names it keeps."""

    def __init__(self, plain: nn.Module, activation: str, kernels: CpuKernels) -> None:
        super().__init__(plain.forward, activation, kernels)
        self._names = _gated_projections(plain)
        for name in self._names:
            setattr(self, name, getattr(plain, name))

    def forward(self, x: Tensor) -> Tensor:  # [..., size] -> the same
        if x.dtype not in DTYPES:
            return self._plain(x)
        gate_proj, up_proj, down_proj = (getattr(self, name) for name in self._names)
        gate, up = gate_proj(x), up_proj(x)
        assert gate.shape == up.shape, (gate.shape, up.shape)
        assert up.stride(-1) == 1
        return down_proj(self._run(gate, up))


class InvariantFunctions(TorchFunctionMode):  # type: ignore[misc]
    """Within it our kernels compute activations, and means of rows, wherever a model calls PyTorch's functions, as in
    gates of recurrent layers and routers of experts: the bits of PyTorch's depend on the number of tokens.
    """

    def __init__(self, kernels: CpuKernels) -> None:
        super().__init__()
        self._cpu_kernels = kernels
        self._means: dict[int, CpuGemm] = {}
        self._kernels = {function: Activation(function, name, kernels) for function, name in _FUNCTIONS.items()}

    def __torch_function__(self, function: Any, _: object, args: Any = (), kwargs: Any = None) -> Any:
        kernel, kwargs = self._kernels.get(function), kwargs or {}
        if kernel is not None and len(args) == 1 and not any(kwargs.values()):  # silu may get inplace=False
            return kernel(args[0])
        is_mean = function is Tensor.mean and args[1:] == (-1,) and kwargs == {"keepdim": True}
        if is_mean and args[0].dtype == torch.float32:
            return self._mean(args[0])
        return function(*args, **kwargs)

    def _mean(self, x: Tensor) -> Tensor:
        """The mean over the last dimension, which stays."""
        size = x.shape[-1]
        if size not in self._means:
            self._means[size] = CpuGemm(torch.full((1, size), 1 / size), self._cpu_kernels, torch.float32)
        return self._means[size](x, None)


def as_activation(module: nn.Module, kernels: CpuKernels) -> Activation | None:
    """A replacement for the module, if that is an activation."""
    if [*module.children(), *module.parameters(), *module.buffers()] or is_special(module):
        return None
    x = inputs_of_all_sizes()
    output = module(x.clone())
    name = next((name for name, function in ACTIVATIONS.items() if rows_close(function(x), output)), None)
    return None if name is None else Activation(module.forward, name, kernels)


def as_gated_mlp(module: nn.Module, kernels: CpuKernels) -> GatedMlp | None:
    """A replacement for the module, if that is a gated MLP."""
    if not _gated_projections(module) or "forward" in vars(module):
        return None
    names = (name for name, function in ACTIVATIONS.items() if _computes_gated_mlp(module, function))
    name = next(names, None)
    return None if name is None else GatedMlp(module, name, kernels)


def _gated_projections(module: nn.Module) -> tuple[str, ...]:
    """The names of the projections of a module that may be a gated MLP; empty if it is none."""
    return next((names for names in _GATED_MLPS if module._modules.keys() >= {*names}), ())


def _computes_gated_mlp(module: nn.Module, activation: Callable[[Tensor], Tensor]) -> bool:
    """Compare with the formula for small projections, and small and large numbers."""
    generator = torch.Generator().manual_seed(0)
    gate, up, down = (partial(linear, weight=weight) for weight in torch.randn(3, 8, 8, generator=generator))
    for layer in (gate, up, down):
        vars(layer).update(layer.keywords)  # T5 reads the weight
    x = inputs_of_all_sizes()
    probe = copy.copy(module)
    probe._modules = module._modules | dict(zip(_gated_projections(module), (gate, up, down), strict=True))
    return rows_close(down(activation(gate(x)) * up(x)), probe(x))
