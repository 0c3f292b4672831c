"""Recurrent layers of a flat batch on CPUs, by recurrent.c: convolutions, the gated delta rule and selective scans.

`slots` are those of paged/recurrence.py.
"""

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tgis.engines.kernels.cpu.activations import ACTIVATIONS
from tgis.engines.kernels.cpu.library import FLOAT, INTEGER, POINTER, CpuKernels, structure
from tgis.errors import Unsupported

# Scratch memory of recurrent.c is on the stack: tokens of a convolution, numbers of a key or of a row of a state.
_MAX_TAPS, _MAX_SIZE = 8, 1024
_ALIASES = {"swish": "silu"}


# `strided` of recurrent.c, and its arguments, which begin with those of a `flat_batch`.
_Strided = structure(("data", POINTER), ("strides", INTEGER * 3), ("in_f32", INTEGER))
_BATCH = ("y states slots", POINTER), ("tokens threads", INTEGER)
_ConvArgs = structure(*_BATCH, ("x weight bias", _Strided), ("channels taps activation", INTEGER))
_DeltaArgs = structure(*_BATCH, ("q k v decay beta", _Strided), ("key_heads key_size heads size normalize", INTEGER))
_ScanArgs = structure(
    *_BATCH, ("x dt a b c d dt_bias z", _Strided), ("heads size groups state_size", INTEGER), ("dt_min dt_max", FLOAT)
)


class StateSpace(NamedTuple):
    """The inputs of a selective scan. A head reads the b and c of its group."""

    x: Tensor  # [T, H, P]
    dt: Tensor  # broadcast to [T, H, P], with the bias
    a: Tensor  # broadcast to [H, P, N]
    b: Tensor  # [T, G, N], as c
    c: Tensor
    d: Tensor | None  # broadcast to [H, P], as the bias
    z: Tensor | None  # [T, H, P], gates the output
    dt_bias: Tensor | None
    dt_limit: tuple[float, float]


class RecurrentKernels:
    """The kernels. Inputs may have any strides, and float32 or the dtype of the output; states are contiguous."""

    def __init__(self, kernels: CpuKernels) -> None:
        self._convolve = kernels.functions("causal_conv", [ctypes.POINTER(_ConvArgs)])
        self._delta_rule = kernels.functions("gated_delta_rule", [ctypes.POINTER(_DeltaArgs)])
        self._scan = kernels.functions("selective_scan", [ctypes.POINTER(_ScanArgs)])

    def causal_conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, tails: Tensor, slots: Tensor
    ) -> Tensor:
        """A convolution of each channel, then an activation: x [T, C], weight [C, K], tails [slots, K - 1, C]."""
        _check("a convolution over", weight.shape[1], _MAX_TAPS)
        assert tails.dtype == x.dtype, (tails.dtype, x.dtype)
        kind = -1 if activation is None else list(ACTIVATIONS).index(_ALIASES.get(activation, activation))
        y, batch = _batch(x, tails, slots)
        self._convolve[x.dtype](_ConvArgs(*batch, *_strided(x.dtype, x, weight.T, bias), *weight.shape, kind))
        return y

    def gated_delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor, slots: Tensor, normalize: bool
    ) -> Tensor:
        """Linear attention [T, HV, DV] of q, k [T, HK, DK], v [T, HV, DV], g, beta [T, HV], states [slots, HV, DK, DV].

        Before each token a state decays by e^g. Each head of q and k serves as many consecutive heads of v. A state has
        the first 32 of the DV columns of a head as [DK, 32], then the next ones.
        """
        _check("keys of", k.shape[2], _MAX_SIZE)
        y, batch = _batch(v, states, slots)
        tensors = _strided(v.dtype, q, k, v, g, beta)
        self._delta_rule[v.dtype](_DeltaArgs(*batch, *tensors, *k.shape[1:], *v.shape[1:], normalize))
        return y

    def selective_scan(self, inputs: StateSpace, states: Tensor, slots: Tensor) -> Tensor:
        """The output [T, H, P] of a state space, states [slots, H, P, N]."""
        x, dt, a, b, c, d, z, dt_bias, dt_limit = inputs
        _check("states of", b.shape[2], _MAX_SIZE)
        assert a.dtype == torch.float32, a.dtype
        y, batch = _batch(x, states, slots)
        repeated = (None if tensor is None else tensor.expand(x.shape) for tensor in (d, dt_bias, z))
        tensors = _strided(x.dtype, x, dt.expand(x.shape), a.expand(states.shape[1:]), b, c, *repeated)
        self._scan[x.dtype](_ScanArgs(*batch, *tensors, *x.shape[1:], *b.shape[1:], *dt_limit))
        return y


def _check(what: str, size: int, most: int) -> None:
    if size > most:
        raise Unsupported(f"recurrent layers with {what} {size} are not supported: at most {most}")


def _batch(like: Tensor, states: Tensor, slots: Tensor) -> tuple[Tensor, list[int]]:
    """An output of the shape and dtype of `like`, and the `flat_batch` for which it is computed."""
    assert states.is_contiguous()
    assert slots.is_contiguous()
    assert (slots.dtype, slots.shape) == (torch.int64, (len(like), 3)), (slots.dtype, slots.shape, like.shape)
    y = torch.empty(like.shape, dtype=like.dtype)
    return y, [y.data_ptr(), states.data_ptr(), slots.data_ptr(), len(y), torch.get_num_threads()]


def _strided(dtype: torch.dtype, *tensors: Tensor | None) -> list[Any]:
    """The tensors as arguments of a function for a dtype."""
    assert all(x is None or x.dtype in (dtype, torch.float32) for x in tensors)
    strides = ctypes.c_int64 * 3
    return [
        _Strided()
        if x is None
        else _Strided(x.data_ptr(), strides(*[0] * (3 - x.ndim), *x.stride()), x.dtype == torch.float32)
        for x in tensors
    ]
