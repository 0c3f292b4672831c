"""Draws of tokens by the Gumbel-max trick.

Each token gets exponentially distributed noise E of its own, and the one with the least E / p is drawn, which is the
one with the highest log(p) plus Gumbel noise -log(E): a token of probability p in a share p of all draws. E is a hash
of the row's seed, the number of tokens generated so far, and the token's id: neighbours, order, batch size and restarts
do not matter. Rounding changes a draw only at a near tie; on a walk along the cumulative sum it would move every
boundary between two tokens.

The hash is splitmix64: 64 bits take two multiplications, in C, PyTorch and Triton alike; those of Philox take ten. The
noise is made from 52 of them, so that a token of p = 1e-12 still gets its share; from 24, none below 6e-8 would.
"""

from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tgis.engines.sampling.logits_processors import Candidates, Filters, Scores, SoftmaxStats
from tgis.engines.sampling.logprobs import ChosenTokens, LogprobRequest, table_with_candidates

_GOLDEN, _FACTOR_1, _FACTOR_2 = (
    unsigned - (1 << 64) for unsigned in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
_UNIFORM_BITS = 52

_Bits = TypeVar("_Bits", Tensor, NDArray[np.int64])  # 64-bit integers, signed or not


def _shift_right(bits: _Bits, count: int) -> _Bits:
    """Shift as if the numbers were unsigned."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _mix(bits: _Bits) -> _Bits:
    """The finalizer of splitmix64."""
    bits = (bits ^ _shift_right(bits, 30)) * _FACTOR_1
    bits = (bits ^ _shift_right(bits, 27)) * _FACTOR_2
    return bits ^ _shift_right(bits, 31)


def noise_keys(seeds: NDArray[np.uint64], steps: NDArray[np.int64]) -> NDArray[np.int64]:
    """The states from which splitmix64 makes the noise of tokens 0, 1, ... in a step. Each is output number `steps` of
    another splitmix64 generator, which starts at the mixed seed.
    """
    return _mix(_mix(seeds.view(np.int64)) + (steps + 1) * _GOLDEN)


def exponential_noise(keys: Tensor, ids: Tensor) -> Tensor:
    """Exponentially distributed float64 numbers above 0 for token ids; `keys` and `ids` are broadcast."""
    bits = _shift_right(_mix(keys + (ids + 1) * _GOLDEN), 64 - _UNIFORM_BITS)
    uniform = (bits.double() + 0.5) * 0.5**_UNIFORM_BITS
    return uniform.neg_().log1p_().neg_()


def gumbel_max(logits: Tensor, ids: Tensor, keys: Tensor) -> Tensor:
    """The index [b, 1] that is drawn in each row of `logits` [b, C] float64, -inf for tokens that are left out. Their
    ids are `ids` [b, C] or [C]; `keys` [b, 1] int64.
    """
    return (logits - exponential_noise(keys, ids).log_()).argmax(-1, keepdim=True)


def draw(scores: Scores, keys: Tensor) -> Tensor:
    """Draw token ids [b, 1] from the whole vocabulary with noise keys [b, 1]."""
    ids = torch.arange(scores.values.shape[1], device=keys.device)
    blocks = scores.row_blocks()
    return torch.cat([gumbel_max(scores.take(rows).scaled_logits(torch.float64), ids, keys[rows]) for rows in blocks])


def draw_filtered(
    scores: Scores, stats: SoftmaxStats, filters: Filters, keys: Tensor, request: LogprobRequest, num_candidates: int
) -> Tensor:
    """Draw from the tokens that the filters keep of the `num_candidates` best ones; returns the table of the draws."""
    candidates = Candidates.of(scores, stats, num_candidates)
    candidates.filter(filters)
    at = gumbel_max(candidates.kept_logits(), candidates.ids, keys)
    logit = candidates.logits.gather(1, at)
    rank = 1 + (candidates.kept & (candidates.logits > logit)).sum(-1, keepdim=True)
    chosen = ChosenTokens(candidates.ids.gather(1, at), logit - candidates.total_mass.log(), rank)
    return table_with_candidates(scores.max_score, chosen, candidates, request)
