# mypy: disallow-untyped-decorators=False
"""Draws of tokens that top_k and top_p have filtered, and what is asked about them, in one Triton kernel.

It computes what `Candidates` of engines/sampling/logits_processors.py does with the best tokens of a row, in double
precision but for the noise of the race.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tgis.engines.kernels.cuda.race import exponential_noise

_COLUMNS = tl.constexpr(5)  # of a table, before the best tokens
_INEXACT, _INVALID = tl.constexpr(1.0), tl.constexpr(2.0)  # states of a row
_LOWEST_BITS = tl.constexpr(0x7FFFFFFF)  # of a float32, but the sign
_LAST_KEY = tl.constexpr(2**63 - 1)
_MIN_BLOCK = 128  # kernels are compiled per power of two of candidates: fewer variants


def filtered_race_table(
    best: tuple[Tensor, Tensor],
    vocab_size: int,
    columns: tuple[Tensor, ...],
    top_k: Tensor | None,
    top_p: Tensor | None,
    max_top: int,
) -> Tensor:
    """The table [b, 5 + 2 max_top], as engines/sampling/logprobs.py has it, of draws from the `best` tokens of rows:
    float32 values [b, C] and ids, in any order.

    `columns` are, each [b, 1]: the highest score, the temperature, the mass of the whole vocabulary, the noise key, and
    how many of the best tokens are wanted, of which `max_top`, at most C, are in the table.
    """
    values, ids = best
    (rows, count), device = values.shape, values.device
    assert max_top <= count
    assert values.is_contiguous()
    assert ids.is_contiguous()
    table = torch.empty(rows, _COLUMNS.value + 2 * max_top, dtype=torch.float64, device=device)
    _filtered_race[rows,](
        *(table, values, ids, vocab_size, count, max_top, *(column.contiguous() for column in columns), top_k, top_p),
        block_size=max(triton.next_power_of_2(count), _MIN_BLOCK),
    )
    return table


@triton.jit(do_not_specialize=["vocab_size", "count", "max_top"])
def _filtered_race(
    table: tl.tensor,
    values: tl.tensor,
    ids: tl.tensor,
    vocab_size: tl.tensor,
    count: tl.tensor,
    max_top: tl.tensor,
    max_scores: tl.tensor,
    temperatures: tl.tensor,
    masses: tl.tensor,
    noise_keys: tl.tensor,
    top_ns: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    block_size: tl.constexpr,
) -> None:
    row, index = tl.program_id(0), tl.arange(0, block_size)
    is_listed = index < count
    value, token = _sorted(values + row * count, ids + row * count, index, is_listed)
    max_score = tl.load(max_scores + row)
    lowest = tl.min(tl.where(is_listed, value, float("inf")), 0)
    is_complete = (lowest == -float("inf")) | (vocab_size <= count)
    kept = is_listed & (value > tl.where(is_complete, -float("inf"), lowest))
    logit = (value.to(tl.float64) - max_score) / tl.load(temperatures + row)
    mass = tl.where(kept, tl.exp(logit), 0.0)
    total = tl.where(is_complete, tl.sum(mass, 0), tl.load(masses + row))
    is_exact = tl.full([], True, tl.int1)
    if top_ks is not None:
        k = tl.load(top_ks + row)
        kth = _element(logit, tl.minimum(tl.maximum(k - 1, 0), count - 1), index)
        is_exact &= (k <= 0) | is_complete | (tl.sum(kept.to(tl.int64), 0) >= k)
        is_complete |= k > 0
        kept &= logit >= tl.where(k > 0, kth, -float("inf"))
        mass = tl.where(kept, mass, 0.0)
        total = tl.where(is_complete, tl.sum(mass, 0), total)
    if top_ps is not None:
        p = tl.load(top_ps + row)
        threshold = tl.where(p < 1, p * total, float("inf"))
        is_exact &= (p >= 1) | is_complete | (tl.sum(mass, 0) >= threshold)
        is_complete |= p < 1
        kept &= (tl.cumsum(mass, 0) - mass < threshold) | (index == 0)
        mass = tl.where(kept, mass, 0.0)
        total = tl.where(is_complete, tl.sum(mass, 0), total)
    arrival = exponential_noise(tl.load(noise_keys + row), token) * tl.exp(-logit)
    at = tl.argmin(tl.where(kept, arrival, float("inf")), 0)
    drawn_logit, log_total = _element(logit, at, index), tl.log(total)
    rank = 1 + tl.sum((kept & (logit > drawn_logit)).to(tl.int32), 0)
    top_n = tl.load(top_ns + row)
    nth = _element(logit, tl.minimum(tl.maximum(top_n - 1, 0), count - 1), index)
    num_top = tl.sum((kept & (logit >= nth)).to(tl.int32), 0)
    is_exact &= is_complete | (tl.sum(kept.to(tl.int64), 0) >= top_n)
    is_valid = tl.abs(max_score) < float("inf")
    state = tl.where(is_valid, tl.where(is_exact, 0.0, _INEXACT), _INVALID)
    own = table + row * (_COLUMNS + 2 * max_top)
    tl.store(own, _element(token, at, index).to(tl.float64))
    tl.store(own + 1, state.to(tl.float64))
    tl.store(own + 2, drawn_logit - log_total)
    tl.store(own + 3, rank.to(tl.float64))
    tl.store(own + 4, num_top.to(tl.float64))
    tl.store(own + _COLUMNS + index, token.to(tl.float64), mask=index < max_top)
    tl.store(own + _COLUMNS + max_top + index, logit - log_total, mask=index < max_top)


@triton.jit
def _sorted(values: tl.tensor, ids: tl.tensor, index: tl.tensor, is_listed: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """By descending value, equal ones by ascending id."""
    value = tl.load(values + index, mask=is_listed, other=0.0) + 0.0  # -0.0 and 0.0 are equal
    bits = value.to(tl.int32, bitcast=True)
    descending = (~(bits ^ ((bits >> 31) & _LOWEST_BITS))).to(tl.int64)
    key = (descending << 32) | tl.load(ids + index, mask=is_listed, other=0)
    key = tl.sort(tl.where(is_listed, key, _LAST_KEY))
    bits = ~(key >> 32).to(tl.int32)
    return (bits ^ ((bits >> 31) & _LOWEST_BITS)).to(tl.float32, bitcast=True), key & 0xFFFFFFFF


@triton.jit
def _element(vector: tl.tensor, at: tl.tensor, index: tl.tensor) -> tl.tensor:
    return tl.sum(tl.where(index == at, vector, 0), 0)
