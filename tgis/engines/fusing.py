"""Small operators of transformers' models on CPUs, each replaced by one pass in C: RMS norms and rotary embeddings.

What a module or a function computes is tried out: only what gives the same numbers is replaced.
"""

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from types import FunctionType, MethodType
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tgis.engines.c_kernels import library

_CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # relative; several roundings against one
_ROTATE = "apply_rotary_pos_emb"  # as transformers' modelling files call it

_Rotate = Callable[..., tuple[Tensor, Tensor]]


def fuse(model: PreTrainedModel) -> int:
    """Replace what can be replaced, in place; how many modules were changed."""
    if model.device.type != "cpu" or model.dtype not in _CLOSE or _kernels(model.dtype) is None:
        return 0
    norms = list(_norms(model))
    for parent, name, norm in norms:
        setattr(parent, name, norm)
    rotating = [module for module in model.modules() if _rotates(module, model.dtype)]
    for module in rotating:
        module.forward = _with_global(module.forward, _ROTATE, rotate)
    return len(norms) + len(rotating)


class RmsNorm(nn.Module):  # type: ignore[misc]
    """x / sqrt(mean(x^2) + eps) * (weight + offset), over the last dimension."""

    def __init__(self, weight: Tensor, eps: float, offset: float) -> None:
        super().__init__()
        kernels = _kernels(weight.dtype)
        assert kernels is not None
        self.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
        self._norm, self._eps, self._offset = kernels.norm, eps, offset
        self._dtype, self._size = weight.dtype, len(weight)
        self._place = self.weight.data_ptr()  # asking the module for its parameter takes as long as all the rest

    def forward(self, x: Tensor) -> Tensor:  # [..., size] -> the same
        """Normalize."""
        x = x.contiguous()
        assert x.dtype == self._dtype, x.dtype
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
    if (
        not isinstance(eps, float)
        or len(weights) != 1
        or weight is None
        or weight.ndim != 1
        or "forward" in vars(module)
    ):
        return None
    if weight.dtype not in _CLOSE:
        return None
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, weight.shape[0], generator=generator) * torch.tensor([[1.0], [30.0], [eps**0.5]])
    candidates = (RmsNorm(weight.detach(), eps, offset) for offset in (0.0, 1.0))
    return next((norm for norm in candidates if _same(module, norm, x.to(weight.dtype))), None)


def _rotates(module: nn.Module, dtype: torch.dtype) -> bool:
    """Whether a module's forward calls a function that does what `rotate` does."""
    forward = getattr(type(module), "forward", None)
    if not isinstance(forward, FunctionType) or "forward" in vars(module) or _ROTATE not in forward.__code__.co_names:
        return False
    return _is_rotation(forward.__globals__[_ROTATE], dtype)


@cache
def _is_rotation(function: _Rotate, dtype: torch.dtype) -> bool:
    """Whether it does the same with whole heads, and with a part of each if it takes that."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 5, heads, 8, generator=generator).to(dtype).transpose(1, 2) for heads in (4, 2))
    angles = torch.randn(2, 2, 5, 8, generator=generator).to(dtype)
    whole, part = (_agree(function, q, k, *angles[..., :size]) for size in (8, 4))
    return whole is True and part is not False


def _agree(function: _Rotate, *states: Tensor) -> bool | None:
    """Whether it does what `rotate` does; None if it refuses."""
    try:
        expected = function(*states)
    except (TypeError, RuntimeError):
        return None
    return all(map(_close, expected, rotate(*states)))


def _same(module: nn.Module, fused: RmsNorm, x: Tensor) -> bool:
    try:
        expected = module(x)
    except (TypeError, RuntimeError):
        return False
    return isinstance(expected, Tensor) and _close(expected, fused(x))


def _close(expected: Tensor, found: Tensor) -> bool:
    """Whether each row is the other's, but for rounding."""
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return False
    difference = (expected.double() - found.double()).abs().amax(-1)
    return bool((difference <= _CLOSE[found.dtype] * expected.double().abs().amax(-1)).all())


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
