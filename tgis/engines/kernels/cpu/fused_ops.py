"""Small operators of transformers' models on CPUs, each replaced by one pass in C: RMS norms and rotary embeddings.

What a module or a function computes is tried out in float32, whatever the model's dtype, where nothing but rounding
can look alike: only what gives the same numbers is replaced.
"""

import copy
import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from inspect import signature
from types import FunctionType, MethodType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from tgis.engines.kernels.cpu.build import library

_DTYPES = (torch.float32, torch.bfloat16)
_CLOSE = 1e-5  # relative to the largest of a row
_ROTATE = "apply_rotary_pos_emb"  # as transformers' modelling files call it

_ARGUMENTS = ["q", "k", "cos", "sin", "unsqueeze_dim"]  # of it

_Rotate = Callable[..., tuple[Tensor, Tensor]]


def fuse(model: PreTrainedModel) -> int:
    """Replace what can be replaced, in place; how many modules were changed."""
    if model.device.type != "cpu" or model.dtype not in _DTYPES or _kernels(model.dtype) is None:
        return 0
    norms = list(_norms(model))
    for parent, name, norm in norms:
        setattr(parent, name, norm)
    rotating = [module for module in model.modules() if _rotates(module)]
    for module in rotating:
        plain = module.forward.__globals__[_ROTATE]
        module.forward = _with_global(module.forward, _ROTATE, partial(_rotate, plain))
    return len(norms) + len(rotating)


class RmsNorm(nn.Module):  # type: ignore[misc]
    """x / sqrt(mean(x^2) + eps) * (weight + offset), over the last dimension, as the module `plain` computes it."""

    def __init__(self, plain: nn.Module, eps: float, offset: float) -> None:
        super().__init__()
        kernels = _kernels(plain.weight.dtype)
        assert kernels is not None
        self.weight = plain.weight
        self._plain = plain.forward
        self._norm, self._eps, self._offset = kernels.norm, eps, offset
        self._dtype, self._size = self.weight.dtype, len(self.weight)
        self._place = self.weight.data_ptr()  # asking the module for its parameter takes as long as all the rest

    def forward(self, x: Tensor) -> Tensor:  # [..., size] -> the same
        """Normalize."""
        if x.dtype != self._dtype:  # some models add up in float32
            return self._plain(x)
        x = x.contiguous()
        assert x.shape[-1] == self._size, x.shape
        y = torch.empty_like(x)
        numbers = x.numel() // self._size, self._size, self._eps, self._offset
        self._norm(x.data_ptr(), self._place, y.data_ptr(), *numbers, torch.get_num_threads())
        return y


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """`q` [B, H, T, D] and `k` [B, K, T, D] (heads and tokens the other way round if `unsqueeze_dim` is 2), each half
    of them rotated with the other by the angles of which `cos` and `sin` are [B or 1, T, at most D]; the rest stays.
    """
    kernels = _kernels(q.dtype)
    assert kernels is not None
    assert q.dtype == k.dtype == cos.dtype == sin.dtype, (q.dtype, cos.dtype)
    order = (0, unsqueeze_dim, 3 - unsqueeze_dim)  # batch, heads, tokens
    batch, _, tokens = (q.shape[place] for place in order)
    size = min(cos.shape[2], q.shape[3], k.shape[3])
    assert cos.shape == sin.shape == (cos.shape[0], tokens, size), (cos.shape, q.shape, k.shape)
    cos, sin = cos.contiguous(), sin.contiguous()
    q, k = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k))
    outputs = torch.empty_like(q), torch.empty_like(k)
    work = (_States.of(x, y, order) for x, y in zip((q, k), outputs, strict=True))
    step = cos.stride(0) if cos.shape[0] > 1 else 0
    shape = batch, tokens, size, step
    kernels.rotate(*work, cos.data_ptr(), sin.data_ptr(), *shape, torch.get_num_threads())
    return outputs


def _rotate(
    plain: _Rotate, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """By `rotate`, but where some are of another dtype, as the angles of some half-precision models, by `plain`."""
    alike = q.dtype == k.dtype == cos.dtype == sin.dtype
    return (rotate if alike else plain)(q, k, cos, sin, unsqueeze_dim)


class _States(ctypes.Structure):
    """A tensor as `rotate` of elementwise.c takes it, and where the result goes."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("heads", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("from_", ctypes.c_int64 * 3),
        ("to", ctypes.c_int64 * 3),
    )

    @classmethod
    def of(cls, x: Tensor, y: Tensor, order: tuple[int, int, int]) -> Self:
        """`order`: which dimensions are batch, heads and tokens."""
        before, after = x.stride(), y.stride()
        strides = (tuple(strides[place] for place in order) for strides in (before, after))
        return cls(x.data_ptr(), y.data_ptr(), x.shape[order[1]], x.shape[3], *strides)


@dataclass(frozen=True, slots=True)
class _Kernels:
    norm: Callable[..., None]
    rotate: Callable[..., None]


@cache
def _kernels(dtype: torch.dtype) -> _Kernels | None:
    compiled = library("elementwise.c", half=int(dtype == torch.bfloat16))
    if compiled is None:
        return None
    pointer, whole, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
    norm, rotate = compiled.norm, compiled.rotate
    norm.argtypes, norm.restype = [pointer] * 3 + [whole] * 2 + [real] * 2 + [whole], None
    states = ctypes.POINTER(_States)
    rotate.argtypes, rotate.restype = [states] * 2 + [pointer] * 2 + [whole] * 5, None
    return _Kernels(norm, rotate)


def _norms(model: PreTrainedModel) -> Iterator[tuple[nn.Module, str, RmsNorm]]:
    for parent in model.modules():
        for name, child in parent.named_children():
            norm = _norm_like(child)
            if norm:
                yield parent, name, norm


def _norm_like(module: nn.Module) -> RmsNorm | None:
    """What computes the same as this module, if that is an RMS norm."""
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    weights = dict(module.named_parameters())
    weight = weights.get("weight")
    if weight is None or len(weights) != 1 or weight.ndim != 1 or weight.dtype not in _DTYPES:
        return None
    if not isinstance(eps, float) or isinstance(weight, DTensor) or "forward" in vars(module):
        return None
    offset = next((offset for offset in (0.0, 1.0) if _is_norm(module, eps, offset)), None)
    return None if offset is None else RmsNorm(module, eps, offset)


def _is_norm(module: nn.Module, eps: float, offset: float) -> bool:
    """Whether it does what `RmsNorm` does, also where the mean is not 0, and numbers are so small that eps counts."""
    module = copy.deepcopy(module).float()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, len(module.weight), generator=generator) + 1
    x *= torch.tensor([[1.0], [30.0], [eps**0.5]])
    try:
        found = module(x)
    except (TypeError, RuntimeError):
        return False
    expected = x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * (module.weight + offset)
    return isinstance(found, Tensor) and _close(expected, found)


def _rotates(module: nn.Module) -> bool:
    """Whether a module's forward calls a function that does what `rotate` does."""
    forward = getattr(type(module), "forward", None)
    if not isinstance(forward, FunctionType) or "forward" in vars(module) or _ROTATE not in forward.__code__.co_names:
        return False
    return _is_rotation(forward.__globals__[_ROTATE])


@cache
def _is_rotation(function: _Rotate) -> bool:
    """Whether it does the same with whole heads, and with a part of each if it takes that."""
    if list(signature(function).parameters) != _ARGUMENTS:
        return False
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, heads, 5, 8, generator=generator) for heads in (4, 2))
    angles = torch.randn(2, 2, 5, 8, generator=generator)
    whole, part = (_agree(function, q, k, *angles[..., :size]) for size in (8, 4))
    return whole is True and part is not False


def _agree(function: _Rotate, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool | None:
    """Whether it rotates halves; None if it refuses."""
    try:
        found = function(q, k, cos, sin)
    except RuntimeError:
        return None
    return all(_close(_halves_rotated(x, cos, sin), y) for x, y in zip((q, k), found, strict=True))


def _halves_rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turned.chunk(2, -1)
    turned = turned * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]
    return torch.cat([turned, rest], -1)


def _close(expected: Tensor, found: Tensor) -> bool:
    """Whether each row is the other's, but for rounding."""
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return False
    return bool(((expected - found).abs().amax(-1) <= _CLOSE * expected.abs().amax(-1)).all())


def _with_global(method: Any, name: str, value: object) -> MethodType:
    """The method, but where it reads that global it finds the value."""
    function = method.__func__
    changed = FunctionType(
        function.__code__,
        {**function.__globals__, name: value},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    changed.__kwdefaults__ = function.__kwdefaults__
    return MethodType(changed, method.__self__)
