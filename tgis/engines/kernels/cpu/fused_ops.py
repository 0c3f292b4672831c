"""Norms, rotary embeddings and activations of transformers' models, each in one pass by elementwise.c.

Models write these in many ways. The output of a module or function is therefore compared with the kernel's formula on
random numbers, in float32 for every dtype, and only where the two agree is it replaced.
"""

import copy
import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from inspect import signature
from operator import itemgetter
from types import FunctionType, MethodType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, relu, silu
from transformers import PreTrainedModel

from tgis.engines.kernels.cpu.library import DTYPES, CpuKernels

_TOLERANCE = 1e-5  # relative to the largest number of a row
_GATED_MLPS = ("gate_proj", "up_proj", "down_proj"), ("wi_0", "wi_1", "wo")  # the projections; the second ones are T5's
_SOFTCAP = "final_logit_softcapping"  # in configurations
_APPLY_ROTARY = "apply_rotary_pos_emb"  # as transformers' modelling files call it
_PARAMETERS = ["q", "k", "cos", "sin", "unsqueeze_dim"]  # of that function

_DEFAULT_EPS = 1e-5  # of norms that do not tell theirs

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {  # in the order of elementwise.c
    "silu": silu,
    "gelu_tanh": partial(gelu, approximate="tanh"),
    "gelu": gelu,
    "relu": relu,
    "relu2": lambda x: relu(x).square(),
    "tanh": torch.tanh,
}

_ApplyRotary = Callable[..., tuple[Tensor, Tensor]]


def fuse(model: PreTrainedModel, kernels: CpuKernels | None) -> int:
    """Replace norms, activations, rotary embeddings and soft caps of logits in a CPU model; how many were replaced."""
    if kernels is None or model.dtype not in DTYPES:
        return 0
    count = 0
    for replace in (_as_gated_mlp, _as_norm, _as_activation):  # whole MLPs first: they contain the others
        replaced = list(_replacements(model, kernels, replace))
        for parent, name, module in replaced:
            setattr(parent, name, module)
        count += len(replaced)
    attentions = [module for module in model.modules() if _applies_rotary(module)]
    for module in attentions:
        rotary = RotaryEmbedding(module.forward.__globals__[_APPLY_ROTARY], kernels)
        module.forward = _with_global(module.forward, _APPLY_ROTARY, rotary)
    return count + len(attentions) + _replace_softcap(model, kernels)


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


class Norm(nn.Module):  # type: ignore[misc]
    """A norm over the last dimension, as the module `plain` computes it."""

    runs_cpu_kernel = True

    def __init__(self, plain: nn.Module, formula: NormFormula, kernels: CpuKernels) -> None:
        super().__init__()
        argtypes = [ctypes.POINTER(_NormParams), *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 5]
        self.weight, self.bias = _weight_and_bias(plain)
        self._plain = plain.forward
        functions = kernels.functions("norm", argtypes)
        self._functions = functions if self.weight is None else {self.weight.dtype: functions[self.weight.dtype]}
        self._size = _norm_size(plain)
        pointers = (None if each is None else each.data_ptr() for each in (self.weight, self.bias))
        self._params = _NormParams(*pointers, self._size, formula.centered, formula.offset, formula.eps)

    def forward(self, x: Tensor) -> Tensor:  # [..., size] -> the same
        if x.dtype not in self._functions:  # some models add up in float32
            return self._plain(x)
        assert x.shape[-1] == self._size, x.shape
        y = x.new_empty(x.shape)
        rows = x.view(1, -1, self._size) if x.is_contiguous() else x[None].flatten(0, -3)  # [outer, inner, size]
        if rows.stride(2) != 1:
            rows = rows.contiguous()
        numbers = *rows.shape[:2], *rows.stride()[:2]
        self._functions[x.dtype](self._params, rows.data_ptr(), y.data_ptr(), *numbers, torch.get_num_threads())
        return y


class _NormParams(ctypes.Structure):
    """`norm_params` of elementwise.c."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("is_centered", ctypes.c_int64),
        ("weight_offset", ctypes.c_float),
        ("eps", ctypes.c_float),
    )


class Activation(nn.Module):  # type: ignore[misc]
    """An activation, as the module `plain` computes it."""

    runs_cpu_kernel = True

    def __init__(self, plain: nn.Module, name: str, kernels: CpuKernels) -> None:
        super().__init__()
        argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int64] * 6
        self._plain = plain.forward
        self._functions = kernels.functions("activation", argtypes)
        self._kind = list(ACTIVATIONS).index(name)

    def forward(self, x: Tensor) -> Tensor:  # [..., size] -> the same
        return self._run(x, None) if x.dtype in DTYPES and x.ndim > 0 else self._plain(x)

    def _run(self, x: Tensor, factor: Tensor | None) -> Tensor:
        """The activation times a factor, whose last dimension is contiguous."""
        rows = x.reshape(-1, x.shape[-1])  # of `factor`, too
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        y = torch.empty(x.shape, dtype=x.dtype)
        pointers = rows.data_ptr(), None if factor is None else factor.data_ptr(), y.data_ptr()
        strides = rows.stride(0), 0 if factor is None else factor.stride(-2)
        self._functions[x.dtype](*pointers, *rows.shape, *strides, self._kind, torch.get_num_threads())
        return y


class GatedMlp(Activation):
    """down_proj(activation(gate_proj(x)) * up_proj(x)), as the module `plain` computes it, whose names it keeps."""

    def __init__(self, plain: nn.Module, activation: str, kernels: CpuKernels) -> None:
        super().__init__(plain, activation, kernels)
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


class SoftCap(Activation):
    """cap * tanh(x / cap), as a hook of the layer that gives x."""

    def __init__(self, cap: float, kernels: CpuKernels) -> None:
        super().__init__(nn.Tanh(), "tanh", kernels)
        self._cap = cap

    def __call__(self, _layer: nn.Module, _inputs: object, x: Tensor) -> Tensor:
        return self.forward(x / self._cap) * self._cap


class RotaryEmbedding:
    """x * cos + rotate_half(x) * sin of queries and keys, as the function `plain` computes it."""

    def __init__(self, plain: _ApplyRotary, kernels: CpuKernels) -> None:
        tensors, pointers = [ctypes.POINTER(_RotaryTensor)] * 2, [ctypes.c_void_p] * 2
        argtypes = tensors + pointers + [ctypes.c_int64] * 5
        self._plain = plain
        self._functions = kernels.functions("rotary_embedding", argtypes)

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        """`q` [B, H, T, D] and `k` [B, K, T, D], or heads and tokens exchanged if `unsqueeze_dim` is 2; `cos` and `sin`
        [B or 1, T, rotary size]. What a head has beyond the rotary size is copied.
        """
        if not q.dtype == k.dtype == cos.dtype == sin.dtype:  # some half-precision models keep their angles in float32
            return self._plain(q, k, cos, sin, unsqueeze_dim)
        dims = (0, unsqueeze_dim, 3 - unsqueeze_dim)  # batch, heads, tokens
        batch, _, tokens = (q.shape[dim] for dim in dims)
        size = min(cos.shape[2], q.shape[3], k.shape[3])
        assert cos.shape == sin.shape == (cos.shape[0], tokens, size), (cos.shape, q.shape, k.shape)
        cos, sin = cos.contiguous(), sin.contiguous()
        q, k = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k))
        outputs = torch.empty_like(q), torch.empty_like(k)
        tensors = (_RotaryTensor.of(x, y, dims) for x, y in zip((q, k), outputs, strict=True))
        batch_stride = cos.stride(0) if cos.shape[0] > 1 else 0
        numbers = batch, tokens, size, batch_stride
        self._functions[q.dtype](*tensors, cos.data_ptr(), sin.data_ptr(), *numbers, torch.get_num_threads())
        return outputs


class _RotaryTensor(ctypes.Structure):
    """`rotary_tensor` of elementwise.c."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("heads", ctypes.c_int64),
        ("head_size", ctypes.c_int64),
        ("x_strides", ctypes.c_int64 * 3),
        ("y_strides", ctypes.c_int64 * 3),
    )

    @classmethod
    def of(cls, x: Tensor, y: Tensor, dims: tuple[int, int, int]) -> Self:
        """`dims` are the axes of batch, heads and tokens."""
        strides = (itemgetter(*dims)(t.stride()) for t in (x, y))
        return cls(x.data_ptr(), y.data_ptr(), x.shape[dims[1]], x.shape[3], *strides)


def _replacements(
    model: PreTrainedModel, kernels: CpuKernels, replace: Callable[[nn.Module, CpuKernels], nn.Module | None]
) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    for parent in model.modules():
        for name, child in parent.named_children():
            module = replace(child, kernels)
            if module:
                yield parent, name, module


def _is_special(module: nn.Module) -> bool:
    """Whether a module has a kernel, or a forward that is not that of its class."""
    return hasattr(module, "runs_cpu_kernel") or "forward" in vars(module)


def _weight_and_bias(module: nn.Module) -> tuple[Tensor | None, Tensor | None]:
    return getattr(module, "weight", None), getattr(module, "bias", None)


def _norm_size(module: nn.Module) -> int:
    """The size of the last dimension; 0 if the module does not look like a norm of one dimension."""
    parameters = dict(module.named_parameters())
    if parameters.keys() - {"weight", "bias"}:
        return 0
    shapes = {tuple(each.shape) for each in parameters.values()}
    if "weight" not in parameters:  # a bias alone is that of many modules
        shapes.add(tuple(getattr(module, "normalized_shape", ())))
    shape = shapes.pop()
    return int(shape[0]) if len(shape) == 1 and not shapes and not _is_special(module) else 0


def _as_norm(module: nn.Module, kernels: CpuKernels) -> Norm | None:
    """A replacement for the module, if that is a norm."""
    size, dtypes = _norm_size(module), {each.dtype for each in module.parameters()}
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", _DEFAULT_EPS))
    if not size or len(dtypes) > 1 or not dtypes.issubset(DTYPES) or not isinstance(eps, float):
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
    return _rows_close(formula(x, *_weight_and_bias(module)), _output(module, x))


def _as_activation(module: nn.Module, kernels: CpuKernels) -> Activation | None:
    """A replacement for the module, if that is an activation."""
    if [*module.children(), *module.parameters(), *module.buffers()] or _is_special(module):
        return None
    x = _numbers_of_all_sizes()
    found = _output(module, x.clone())
    name = next((name for name, function in ACTIVATIONS.items() if _rows_close(function(x), found)), None)
    return None if name is None else Activation(module, name, kernels)


def _numbers_of_all_sizes() -> Tensor:  # [64, 8], each row of one size
    return torch.randn(64, 8, generator=torch.Generator().manual_seed(0)) * torch.logspace(-1, 2, 64)[:, None]


def _as_gated_mlp(module: nn.Module, kernels: CpuKernels) -> GatedMlp | None:
    """A replacement for the module, if that is a gated MLP."""
    if not _gated_projections(module) or "forward" in vars(module):
        return None
    found = (name for name, function in ACTIVATIONS.items() if _computes_gated_mlp(module, function))
    activation = next(found, None)
    return None if activation is None else GatedMlp(module, activation, kernels)


def _gated_projections(module: nn.Module) -> tuple[str, ...]:
    """The names of the projections of what may be a gated MLP; empty if it is none."""
    return next((names for names in _GATED_MLPS if module._modules.keys() >= {*names}), ())


def _computes_gated_mlp(module: nn.Module, activation: Callable[[Tensor], Tensor]) -> bool:
    """Compare with the formula for small projections, and small and large numbers."""
    generator = torch.Generator().manual_seed(0)
    gate, up, down = (partial(linear, weight=weight) for weight in torch.randn(3, 8, 8, generator=generator))
    for each in (gate, up, down):
        vars(each).update(each.keywords)  # T5 looks at the weight
    x = _numbers_of_all_sizes()
    probe = copy.copy(module)
    probe._modules = module._modules | dict(zip(_gated_projections(module), (gate, up, down), strict=True))
    return _rows_close(down(activation(gate(x)) * up(x)), _output(probe, x))


def _replace_softcap(model: PreTrainedModel, kernels: CpuKernels) -> int:
    """Let a hook cap logits in place of the model's own code; how many modules were changed."""
    config = model.config.get_text_config(decoder=True)
    cap = getattr(config, _SOFTCAP, None)
    if not cap or not _computes_logits(model, lambda x: cap * torch.tanh(x / cap)):
        return 0
    setattr(config, _SOFTCAP, None)
    if not _computes_logits(model, lambda x: x):
        setattr(config, _SOFTCAP, cap)
        return 0
    model.get_output_embeddings().register_forward_hook(SoftCap(cap, kernels))
    return 1


class _ModelOutput:
    """What a model without its head gives, as far as logits depend on it."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, _: str) -> None: ...


def _computes_logits(model: PreTrainedModel, formula: Callable[[Tensor], Tensor]) -> bool:
    """Whether the model makes logits by this formula from what its last layer gives."""
    x = _numbers_of_all_sizes()[None]
    probe, body = copy.copy(model), copy.copy(model.base_model)
    body.forward = lambda **_: _ModelOutput(x)
    probe._modules = model._modules | {model.base_model_prefix: body, "lm_head": lambda hidden: hidden}
    return _rows_close(formula(x), _output(lambda: probe().logits))


def _applies_rotary(module: nn.Module) -> bool:
    """Whether the forward of a module calls a function that computes what `RotaryEmbedding` does."""
    forward = getattr(type(module), "forward", None)
    if not isinstance(forward, FunctionType) or "forward" in vars(module):
        return False
    return _APPLY_ROTARY in forward.__code__.co_names and _computes_rotary(forward.__globals__[_APPLY_ROTARY])


@cache
def _computes_rotary(function: _ApplyRotary) -> bool:
    """Compare with `_rotate_halves` for whole heads, and for a part of each head if the function accepts that."""
    if list(signature(function).parameters) != _PARAMETERS:
        return False
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, heads, 5, 8, generator=generator) for heads in (4, 2))
    angles = torch.randn(2, 2, 5, 8, generator=generator)
    whole, part = (_matches_rotate_halves(function, q, k, *angles[..., :size]) for size in (8, 4))
    return whole is True and part is not False


def _matches_rotate_halves(function: _ApplyRotary, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool | None:
    """Whether the function rotates halves; None if it does not accept these shapes."""
    found = _output(function, q, k, cos, sin)
    return found and all(_rows_close(_rotate_halves(x, cos, sin), y) for x, y in zip((q, k), found, strict=True))


def _rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rotary, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = rotary.chunk(2, -1)
    rotary = rotary * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]
    return torch.cat([rotary, rest], -1)


def _output(function: Callable[..., Any], *inputs: Tensor) -> Any:
    """The output of what may not be made for such inputs; None if it is not."""
    try:
        return function(*inputs)
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return None


def _rows_close(expected: Tensor, found: Any) -> bool:
    """Whether each row is the same but for rounding."""
    if not isinstance(found, Tensor) or expected.shape != found.shape or expected.dtype != found.dtype:
        return False
    return bool(((expected - found).abs().amax(-1) <= _TOLERANCE * expected.abs().amax(-1)).all())


def _with_global(method: Any, name: str, value: object) -> MethodType:
    """A copy of the method that sees another value of one global."""
    function = method.__func__
    names = {**function.__globals__, name: value}
    changed = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    changed.__kwdefaults__ = function.__kwdefaults__
    return MethodType(changed, method.__self__)
