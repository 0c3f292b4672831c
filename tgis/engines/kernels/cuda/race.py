# mypy: disallow-untyped-decorators=False
"""Exponential races over whole vocabularies in Triton, in one pass over the scores: see engines/sampling/draws.py.

In single precision, so near ties may end in another way than elsewhere. Uniform numbers are taken from the nearer end
of their range, so that neither tail of the noise loses precision.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096  # tokens of a program
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_FACTOR_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_FACTOR_2 = tl.constexpr(0x94D049BB133111EB)
_INTEGERS = tl.constexpr(1 << 52)  # that uniform numbers are made from
_UNIT = tl.constexpr(0.5**52)


def race_winners(scores: Tensor, max_scores: Tensor, temperatures: Tensor, keys: Tensor) -> Tensor:
    """Token ids, int64 [b, 1]. `scores` [b, V]; the others [b, 1]: the highest score of each row, its temperature, and
    the key of its noise. All tensors are on the current device.
    """
    (rows, vocab_size), device = scores.shape, scores.device
    assert scores.stride(1) == 1
    blocks = triton.cdiv(vocab_size, _BLOCK)
    arrivals = torch.empty(rows, blocks, dtype=torch.float32, device=device)
    winners = torch.empty(rows, blocks, dtype=torch.int64, device=device)
    columns = (column.contiguous() for column in (max_scores.float(), temperatures.float(), keys))
    _race_block[rows, blocks](
        *(scores, scores.stride(0), vocab_size, *columns, arrivals, winners), block_size=_BLOCK, num_warps=8
    )
    return winners.gather(1, arrivals.argmin(-1, keepdim=True))


@triton.jit
def _race_block(
    scores: tl.tensor,
    stride: tl.tensor,
    vocab_size: tl.tensor,
    max_scores: tl.tensor,
    temperatures: tl.tensor,
    keys: tl.tensor,
    arrivals: tl.tensor,
    winners: tl.tensor,
    block_size: tl.constexpr,
) -> None:
    row, block = tl.program_id(0), tl.program_id(1)
    ids = block * block_size + tl.arange(0, block_size)
    score = tl.load(scores + row.to(tl.int64) * stride + ids, mask=ids < vocab_size, other=-float("inf")).to(tl.float32)
    logits = (score - tl.load(max_scores + row)) / tl.load(temperatures + row)
    arrival = exponential_noise(tl.load(keys + row), ids) * tl.exp(-logits)
    first = tl.minimum(block * block_size + tl.argmin(arrival, 0), vocab_size - 1)  # valid even if all are NaN
    place = row * tl.num_programs(1) + block
    tl.store(arrivals + place, tl.min(arrival, 0))
    tl.store(winners + place, first.to(tl.int64))


@triton.jit
def exponential_noise(key: tl.tensor, ids: tl.tensor) -> tl.tensor:
    """-log(1 - u), where u is (integer + 0.5) / 2^52."""
    bits = key.to(tl.uint64) + (ids + 1).to(tl.uint64) * _GOLDEN
    bits = (bits ^ (bits >> 30)) * _FACTOR_1
    bits = (bits ^ (bits >> 27)) * _FACTOR_2
    integer = (bits ^ (bits >> 31)) >> 12
    is_low = integer < _INTEGERS // 2
    distance = tl.where(is_low, integer, _INTEGERS - 1 - integer)  # from the nearer end
    u = (distance.to(tl.float32) + 0.5) * _UNIT
    series = u * (1 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5 + u * (1 / 6 + u / 7))))))
    near_zero = tl.where(u < 1 / 16, series, -tl.log(1 - u))  # the logarithm's error is absolute around 1
    return tl.where(is_low, near_zero, -tl.log(u))
