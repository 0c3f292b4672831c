"""Draws of tokens by exponential races.

Each token gets exponentially distributed noise E of its own, and the one with the least E / p is drawn: a token of
probability p in a share p of all draws. E is a hash of the row's seed, the number of tokens generated so far, and the
token's id: neighbours, order, batch size and restarts do not matter. Rounding changes a draw only at a near tie; on a
walk along the cumulative sum it would move every boundary between two tokens.

The hash is splitmix64: 64 bits take two multiplications, in C, PyTorch and Triton alike; those of Philox take ten. The
noise is made from 52 of them, so that a token of p = 1e-12 still gets its share; from 24, none below 6e-8 would.
"""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tgis.engines.kernels.cpu.library import CpuKernels
from tgis.engines.kernels.cpu.race import CpuRace
from tgis.engines.kernels.cuda import has_kernels
from tgis.engines.sampling.logits_processors import Scores

_GOLDEN, _FACTOR_1, _FACTOR_2 = (
    unsigned - (1 << 64) for unsigned in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
_UNIFORM_BITS = 52

Draw = Callable[[Scores, Tensor], Tensor]  # from the whole vocabulary: noise keys [b, 1] -> token ids [b, 1]

_Bits = TypeVar("_Bits", Tensor, NDArray[np.int64])  # 64 of them, whatever the sign


def _shift_right(bits: _Bits, count: int) -> _Bits:
    """As of unsigned numbers."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _mix(bits: _Bits) -> _Bits:
    """The finalizer of splitmix64."""
    bits = (bits ^ _shift_right(bits, 30)) * _FACTOR_1
    bits = (bits ^ _shift_right(bits, 27)) * _FACTOR_2
    return bits ^ _shift_right(bits, 31)


def noise_keys(seeds: NDArray[np.uint64], steps: NDArray[np.int64]) -> NDArray[np.int64]:
    """What splitmix64 starts from to make the noise of token 0, 1, ... in a step of a seed: output `steps` of another,
    which starts at the mixed seed.
    """
    return _mix(_mix(seeds.view(np.int64)) + (steps + 1) * _GOLDEN)


def exponential_noise(keys: Tensor, ids: Tensor) -> Tensor:
    """Float64 above 0, exponentially distributed, for each id of a token; `keys` and `ids` are broadcast."""
    bits = _shift_right(_mix(keys + (ids + 1) * _GOLDEN), 64 - _UNIFORM_BITS)
    uniform = (bits.double() + 0.5) * 0.5**_UNIFORM_BITS
    return uniform.neg_().log1p_().neg_()


def race(logits: Tensor, ids: Tensor, keys: Tensor) -> Tensor:
    """The index [b, 1] of each row's winner; `logits` [b, C] float64, -inf for tokens that do not take part, whose ids
    are `ids` [b, C] or [C]; `keys` [b, 1] int64.
    """
    return (logits - exponential_noise(keys, ids).log_()).argmax(-1, keepdim=True)


def select_draw(device: torch.device, kernels: CpuKernels | None) -> Draw:
    """The fastest way on this device."""
    if kernels is not None:
        return partial(_draw_on_cpu, CpuRace(kernels))
    return _draw_on_gpu if has_kernels(device) else draw


def draw(scores: Scores, keys: Tensor) -> Tensor:
    """In plain PyTorch."""
    ids = torch.arange(scores.values.shape[1], device=keys.device)
    blocks = scores.row_blocks()
    return torch.cat([race(scores.take(rows).scaled_logits(torch.float64), ids, keys[rows]) for rows in blocks])


def _draw_on_cpu(kernel: CpuRace, scores: Scores, keys: Tensor) -> Tensor:
    if scores.values.dtype not in kernel.dtypes:
        return draw(scores, keys)
    return kernel(scores.values, scores.max_score, scores.temperature, keys)


def _draw_on_gpu(scores: Scores, keys: Tensor) -> Tensor:
    from tgis.engines.kernels.cuda.race import race_winners  # noqa: PLC0415 - needs Triton, which CPUs lack

    return race_winners(scores.values, scores.max_score, scores.temperature, keys)
