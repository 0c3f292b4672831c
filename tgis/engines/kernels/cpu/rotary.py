"""Rotary embeddings as a kernel of elementwise.c."""

import ctypes
from collections.abc import Callable
from functools import cache
from inspect import signature
from operator import itemgetter
from types import FunctionType, MethodType
from typing import Any, Self

import torch
from torch import Tensor, nn

from tgis.engines.kernels.cpu.library import CpuKernels
from tgis.engines.kernels.cpu.probes import output_of, rows_close

_APPLY_ROTARY = "apply_rotary_pos_emb"  # name in the modelling files of transformers
_PARAMETERS = ["q", "k", "cos", "sin", "unsqueeze_dim"]  # parameters of apply_rotary_pos_emb

_ApplyRotary = Callable[..., tuple[Tensor, Tensor]]


def fuse_rotary(module: nn.Module, kernels: CpuKernels) -> bool:
    """Replace the function for rotary embeddings that a module calls; False if there is none that is known."""
    forward = getattr(type(module), "forward", None)
    if not isinstance(forward, FunctionType) or "forward" in vars(module):
        return False
    if _APPLY_ROTARY not in forward.__code__.co_names or not computes_rotary(forward.__globals__[_APPLY_ROTARY]):
        return False
    rotary = RotaryEmbedding(forward.__globals__[_APPLY_ROTARY], kernels)
    module.forward = _with_global(module.forward, _APPLY_ROTARY, rotary)
    return True


class RotaryEmbedding:
    """x * cos + rotate_half(x) * sin of queries and keys, as the function `plain` computes it."""

    def __init__(self, plain: _ApplyRotary, kernels: CpuKernels) -> None:
        tensors, pointers = [ctypes.POINTER(_RotaryTensor)] * 2, [ctypes.c_void_p] * 2
        argtypes = tensors + pointers + [ctypes.c_int64] * 5
        self._plain = plain
        self._functions = kernels.functions("rotary_embedding", argtypes)

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        """`q` [B, H, T, D] and `k` [B, K, T, D], or heads and tokens exchanged if `unsqueeze_dim` is 2; `cos` and `sin`
        [B or 1, T, rotary size]. The rest of each head is copied.
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
        sizes = batch, tokens, size, batch_stride
        self._functions[q.dtype](*tensors, cos.data_ptr(), sin.data_ptr(), *sizes, torch.get_num_threads())
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


@cache
def computes_rotary(function: _ApplyRotary) -> bool:
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
    outputs = output_of(function, q, k, cos, sin)
    return outputs and all(rows_close(_rotate_halves(x, cos, sin), y) for x, y in zip((q, k), outputs, strict=True))


def _rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rotary, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = rotary.chunk(2, -1)
    rotary = rotary * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]
    return torch.cat([rotary, rest], -1)


def _with_global(method: Any, name: str, value: object) -> MethodType:
    """A copy of the method that sees another value of one global."""
    function = method.__func__
    variables = {**function.__globals__, name: value}
    changed = FunctionType(function.__code__, variables, function.__name__, function.__defaults__, function.__closure__)
    changed.__kwdefaults__ = function.__kwdefaults__
    return MethodType(changed, method.__self__)
