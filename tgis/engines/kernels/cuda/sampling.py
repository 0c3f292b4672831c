# mypy: disallow-untyped-decorators=False
"""Choosing the next tokens on the device, in Triton: argmax and Gumbel-max over whole vocabularies, in one pass over
the scores, and draws from the best tokens that top_k and top_p have filtered.

Draws take the token with the least E / p, as engines/sampling/draws.py does, with the same noise E but in single
precision, so near ties may end in another way than elsewhere. Uniform numbers are taken from the nearer end of their
range, so that neither tail of the noise loses precision.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096  # tokens per loop iteration, or of a program
_MIN_CANDIDATES = 128  # kernels are compiled per power of two of candidates: fewer variants
_COLUMNS = tl.constexpr(5)  # of a table, before the best tokens
_INVALID, _INEXACT = tl.constexpr(1.0), tl.constexpr(2.0)  # states of a row; inexact ones are searched
_STEPS = tl.constexpr(33)  # of a bisection of 32-bit integers
_LOWEST_BITS = tl.constexpr(0x7FFFFFFF)  # of a float32, but the sign
_LAST_KEY = tl.constexpr(2**63 - 1)
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_FACTOR_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_FACTOR_2 = tl.constexpr(0x94D049BB133111EB)
_INTEGERS = tl.constexpr(1 << 52)  # that uniform numbers are made from
_UNIT = tl.constexpr(0.5**52)


def best_token_table(values: Tensor) -> Tensor:
    """The table [b, 5], in the layout of engines/sampling/logprobs.py, of the tokens with the highest of `values`
    [b, V], which have at most single precision; of equal ones the lowest id. On the current device.
    """
    rows, vocab_size = values.shape
    assert values.stride(1) == 1
    assert values.itemsize <= torch.float32.itemsize
    table = torch.empty(rows, _COLUMNS.value, dtype=torch.float64, device=values.device)
    _best_token[rows,](table, values, values.stride(0), vocab_size, block_size=_BLOCK, num_warps=8)
    return table


@triton.jit
def _best_token(
    table: tl.tensor, values: tl.tensor, stride: tl.tensor, vocab_size: tl.tensor, block_size: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    highest = tl.full([block_size], float("-inf"), tl.float32)
    first = tl.zeros([block_size], tl.int32)  # a valid id, even of a row without any number
    is_nan = tl.zeros([block_size], tl.int32)
    for start in range(0, vocab_size, block_size):
        ids = start + tl.arange(0, block_size)
        value = tl.load(values + row * stride + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
        is_nan |= (value != value).to(tl.int32)
        first = tl.where(value > highest, ids, first)
        highest = tl.maximum(highest, value)
    maximum = tl.max(highest, 0)
    token_id = tl.min(tl.where(highest == maximum, first, vocab_size - 1), 0)
    is_invalid = (tl.max(is_nan, 0) > 0) | (tl.abs(maximum) == float("inf"))
    column = tl.arange(0, 8)
    line = tl.where(column == 0, token_id, tl.where((column == 1) & is_invalid, _INVALID, 0.0)).to(tl.float64)
    tl.store(table + row * _COLUMNS + column, line, mask=column < _COLUMNS)


def gumbel_max(scores: Tensor, max_scores: Tensor, temperatures: Tensor, keys: Tensor) -> Tensor:
    """Token ids, int64 [b, 1]. `scores` [b, V]; the others [b, 1]: the highest score of each row, its temperature, and
    the key of its noise. All tensors are on the current device.
    """
    (rows, vocab_size), device = scores.shape, scores.device
    assert scores.stride(1) == 1
    blocks = triton.cdiv(vocab_size, _BLOCK)
    minima = torch.empty(rows, blocks, dtype=torch.float32, device=device)
    token_ids = torch.empty(rows, blocks, dtype=torch.int64, device=device)
    columns = (column.contiguous() for column in (max_scores.float(), temperatures.float(), keys))
    _gumbel_max_block[rows, blocks](
        *(scores, scores.stride(0), vocab_size, *columns, minima, token_ids), block_size=_BLOCK, num_warps=8
    )
    return token_ids.gather(1, minima.argmin(-1, keepdim=True))


@triton.jit
def _gumbel_max_block(
    scores: tl.tensor,
    stride: tl.tensor,
    vocab_size: tl.tensor,
    max_scores: tl.tensor,
    temperatures: tl.tensor,
    keys: tl.tensor,
    minima: tl.tensor,
    token_ids: tl.tensor,
    block_size: tl.constexpr,
) -> None:
    row, block = tl.program_id(0), tl.program_id(1)
    ids = block * block_size + tl.arange(0, block_size)
    score = tl.load(scores + row.to(tl.int64) * stride + ids, mask=ids < vocab_size, other=-float("inf")).to(tl.float32)
    logits = (score - tl.load(max_scores + row)) / tl.load(temperatures + row)
    ratio = exponential_noise(tl.load(keys + row), ids) * tl.exp(-logits)  # E / p
    first = tl.minimum(block * block_size + tl.argmin(ratio, 0), vocab_size - 1)  # valid even if all are NaN
    place = row * tl.num_programs(1) + block
    tl.store(minima + place, tl.min(ratio, 0))
    tl.store(token_ids + place, first.to(tl.int64))


@triton.jit
def exponential_noise(key: tl.tensor, ids: tl.tensor) -> tl.tensor:
    """E = -log(1 - u), where u is (integer + 0.5) / 2^52."""
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


def filtered_draw_table(
    scores: Tensor,
    best: tuple[Tensor, Tensor],
    columns: tuple[Tensor, ...],
    top_k: Tensor | None,
    top_p: Tensor | None,
    max_top: int,
) -> Tensor:
    """The table [b, 5 + 2 max_top], in the layout of engines/sampling/logprobs.py, of draws from `scores` [b, V]. Rows
    for which the `best` tokens, float32 values [b, C] and ids in any order, are not enough are searched.

    It computes what `Candidates` of engines/sampling/logits_processors.py does, in double precision but for the noise.

    `columns` are, each [b, 1]: the highest score, the temperature, the mass of the whole vocabulary, the noise key, and
    how many of the best tokens are wanted, of which `max_top`, at most C, are in the table.
    """
    values, ids = best
    (rows, count), device = values.shape, values.device
    assert max_top <= count
    assert scores.stride(1) == 1
    assert values.is_contiguous()
    assert ids.is_contiguous()
    table = torch.empty(rows, _COLUMNS.value + 2 * max_top, dtype=torch.float64, device=device)
    max_scores, temperatures, masses, keys, top_n = (column.contiguous() for column in columns)
    _filtered_draw[rows,](
        *(table, values, ids, scores.shape[1], count, max_top),
        *(max_scores, temperatures, masses, keys, top_n, top_k, top_p),
        block_size=max(triton.next_power_of_2(count), _MIN_CANDIDATES),
    )
    _searched_draw[rows,](
        *(table, scores, scores.stride(0), scores.shape[1], max_top),
        *(max_scores, temperatures, keys, top_n, top_k, top_p),
        top_size=triton.next_power_of_2(max(max_top, 1)),
        block_size=_BLOCK,
        num_warps=8,
    )
    return table


@triton.jit(do_not_specialize=["vocab_size", "count", "max_top"])
def _filtered_draw(
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
    ratio = exponential_noise(tl.load(noise_keys + row), token) * tl.exp(-logit)  # E / p
    at = tl.argmin(tl.where(kept, ratio, float("inf")), 0)
    drawn_logit, log_total = _element(logit, at, index), tl.log(total)
    rank = 1 + tl.sum((kept & (logit > drawn_logit)).to(tl.int32), 0)
    top_n = tl.load(top_ns + row)
    nth = _element(logit, tl.minimum(tl.maximum(top_n - 1, 0), count - 1), index)
    num_top = tl.minimum(tl.sum((kept & (logit >= nth)).to(tl.int32), 0), max_top)
    is_exact &= is_complete | (tl.sum(kept.to(tl.int64), 0) >= top_n)
    is_valid = tl.abs(max_score) < float("inf")
    state = tl.where(is_valid, tl.where(is_exact, 0.0, _INEXACT), _INVALID)
    line = table + row * (_COLUMNS + 2 * max_top)
    tl.store(line, _element(token, at, index).to(tl.float64))
    tl.store(line + 1, state.to(tl.float64))
    tl.store(line + 2, drawn_logit - log_total)
    tl.store(line + 3, rank.to(tl.float64))
    tl.store(line + 4, num_top.to(tl.float64))
    tl.store(line + _COLUMNS + index, token.to(tl.float64), mask=index < max_top)
    tl.store(line + _COLUMNS + max_top + index, logit - log_total, mask=index < max_top)


@triton.jit(do_not_specialize=["vocab_size", "max_top"])
def _searched_draw(
    table: tl.tensor,
    scores: tl.tensor,
    stride: tl.tensor,
    vocab_size: tl.tensor,
    max_top: tl.tensor,
    max_scores: tl.tensor,
    temperatures: tl.tensor,
    noise_keys: tl.tensor,
    top_ns: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    top_size: tl.constexpr,
    block_size: tl.constexpr,
) -> None:
    """Draw from the whole row where the list was too short. The kept tokens are those above a level and the first ones
    at it, which bisections find; the table has the ids of the best tokens already.
    """
    row = tl.program_id(0)
    line = table + row * (_COLUMNS + 2 * max_top)
    if tl.load(line + 1) == _INEXACT:
        scores += row.to(tl.int64) * stride
        max_score, temperature = tl.load(max_scores + row), tl.load(temperatures + row)
        key = tl.load(noise_keys + row)
        level, last_id = tl.full([], -(2**31), tl.int64), tl.zeros([], tl.int64) + vocab_size - 1
        if top_ks is not None:
            k = tl.load(top_ks + row)
            k = tl.where(k > 0, k, _LAST_KEY)
            above = _order(max_score) + 1
            for _ in range(_STEPS):
                middle = (level + above) >> 1
                count, _mass = _kept(scores, vocab_size, max_score, temperature, middle, last_id, block_size)
                level, above = tl.where(count >= k, middle, level), tl.where(count >= k, above, middle)
        if top_ps is not None:
            p = tl.load(top_ps + row)
            _count, total = _kept(scores, vocab_size, max_score, temperature, level, last_id, block_size)
            threshold = tl.where(p < 1, tl.maximum(p * total, 1e-300), float("inf"))
            below, level = level - 1, _order(max_score)
            for _ in range(_STEPS):  # the lowest level above which there is less than the threshold
                middle = (below + level) >> 1
                _count, mass = _kept(scores, vocab_size, max_score, temperature, middle, below * 0 - 1, block_size)
                below, level = tl.where(mass < threshold, below, middle), tl.where(mass < threshold, middle, level)
            after, last_id = last_id + 1, last_id * 0
            for _ in range(_STEPS):  # the last token before which there is less than the threshold
                middle = (last_id + after) >> 1
                _count, mass = _kept(scores, vocab_size, max_score, temperature, level, middle - 1, block_size)
                last_id, after = tl.where(mass < threshold, middle, last_id), tl.where(mass < threshold, after, middle)
        num_kept, total = _kept(scores, vocab_size, max_score, temperature, level, last_id, block_size)
        least, first = tl.full([block_size], float("inf"), tl.float64), tl.zeros([block_size], tl.int64)
        for start in range(0, vocab_size, block_size):
            ids = start + tl.arange(0, block_size)
            value = tl.load(scores + ids, mask=ids < vocab_size, other=-float("inf")).to(tl.float32)
            logit = (value.to(tl.float64) - max_score) / temperature
            ratio = exponential_noise(key, ids) * tl.exp(-logit)  # E / p
            is_less = _is_kept(value, ids, level, last_id) & (ratio < least)
            least, first = tl.where(is_less, ratio, least), tl.where(is_less, ids, first)
        token = _element(first, tl.argmin(least, 0), tl.arange(0, block_size))
        drawn = tl.load(scores + token).to(tl.float32)
        higher, _mass = _kept(scores, vocab_size, max_score, temperature, _order(drawn), last_id * 0 - 1, block_size)
        index = tl.arange(0, top_size)
        top_ids = tl.load(line + _COLUMNS + index, mask=index < max_top, other=0.0).to(tl.int64)
        logit = (tl.load(scores + top_ids).to(tl.float64) - max_score) / temperature
        nth = _element(logit, tl.maximum(tl.load(top_ns + row) - 1, 0), index)
        num_top = tl.sum(((index < max_top) & (index < num_kept) & (logit >= nth)).to(tl.int32), 0)
        tl.store(line, token.to(tl.float64))
        tl.store(line + 1, tl.zeros([], tl.float64))
        tl.store(line + 2, (drawn.to(tl.float64) - max_score) / temperature - tl.log(total))
        tl.store(line + 3, (higher + 1).to(tl.float64))
        tl.store(line + 4, num_top.to(tl.float64))
        tl.store(line + _COLUMNS + max_top + index, logit - tl.log(total), mask=index < max_top)


@triton.jit
def _kept(
    scores: tl.tensor,
    vocab_size: tl.tensor,
    max_score: tl.tensor,
    temperature: tl.tensor,
    level: tl.tensor,
    last_id: tl.tensor,
    block_size: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The number of tokens that are kept, and their mass."""
    count, mass = tl.zeros([block_size], tl.int64), tl.zeros([block_size], tl.float64)
    for start in range(0, vocab_size, block_size):
        ids = start + tl.arange(0, block_size)
        value = tl.load(scores + ids, mask=ids < vocab_size, other=-float("inf")).to(tl.float32)
        kept = _is_kept(value, ids, level, last_id)
        count += kept.to(tl.int64)
        mass += tl.where(kept, tl.exp((value.to(tl.float64) - max_score) / temperature), 0.0)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
def _is_kept(value: tl.tensor, ids: tl.tensor, level: tl.tensor, last_id: tl.tensor) -> tl.tensor:
    """Whether tokens are above a level, or at it and not after the last one."""
    order = _order(value)
    return (value > -float("inf")) & ((order > level) | ((order == level) & (ids <= last_id)))


@triton.jit
def _order(value: tl.tensor) -> tl.tensor:
    """Integers in the order of float32 numbers; -0.0 and 0.0 are equal."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & _LOWEST_BITS)).to(tl.int64)


@triton.jit
def _sorted(values: tl.tensor, ids: tl.tensor, index: tl.tensor, is_listed: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Values and ids by descending value, equal ones by ascending id."""
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
