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
_COLUMNS = tl.constexpr(5)  # columns of a table that precede the best tokens
_INVALID = tl.constexpr(1.0)  # state of a row
_LOWEST_BITS = tl.constexpr(0x7FFFFFFF)  # all bits of a float32 except the sign
_LAST_KEY, _LAST_ID = tl.constexpr(2**63 - 1), tl.constexpr(2**32 - 1)
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_FACTOR_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_FACTOR_2 = tl.constexpr(0x94D049BB133111EB)
_INTEGERS = tl.constexpr(1 << 52)  # number of integers behind uniform numbers
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
    distance = tl.where(is_low, integer, _INTEGERS - 1 - integer)  # distance to the nearer end
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
    values, ids = (tensor.contiguous() for tensor in best)
    rows, count = values.shape
    assert max_top <= count
    assert scores.stride(1) == 1
    table = torch.empty(rows, _COLUMNS.value + 2 * max_top, dtype=torch.float64, device=values.device)
    _filtered_draw[rows,](
        *(table, scores, scores.stride(0), scores.shape[1], values, ids, count, max_top),
        *(*(column.contiguous() for column in columns), top_k, top_p),
        list_size=max(triton.next_power_of_2(count), _MIN_CANDIDATES),
        block_size=_BLOCK,
        num_warps=8,
    )
    return table


@triton.jit(do_not_specialize=["vocab_size", "count", "max_top"])
def _filtered_draw(
    table: tl.tensor,
    scores: tl.tensor,
    stride: tl.tensor,
    vocab_size: tl.tensor,
    values: tl.tensor,
    ids: tl.tensor,
    count: tl.tensor,
    max_top: tl.tensor,
    max_scores: tl.tensor,
    temperatures: tl.tensor,
    masses: tl.tensor,
    noise_keys: tl.tensor,
    top_ns: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    list_size: tl.constexpr,
    block_size: tl.constexpr,
) -> None:
    row, index = tl.program_id(0), tl.arange(0, list_size)
    is_listed = index < count
    value, token = _sorted(values + row * count, ids + row * count, index, is_listed)
    max_score, temperature = tl.load(max_scores + row), tl.load(temperatures + row)
    noise_key, top_n = tl.load(noise_keys + row), tl.load(top_ns + row)
    k = 0 if top_ks is None else tl.load(top_ks + row)
    p = 1.0 if top_ps is None else tl.load(top_ps + row)
    lowest = tl.min(tl.where(is_listed, value, float("inf")), 0)
    is_complete = (lowest == -float("inf")) | (vocab_size <= count)
    kept = is_listed & (value > tl.where(is_complete, -float("inf"), lowest))
    logit = (value.to(tl.float64) - max_score) / temperature
    mass = tl.where(kept, tl.exp(logit), 0.0)
    total = tl.where(is_complete, tl.sum(mass, 0), tl.load(masses + row))
    is_exact = tl.full([], True, tl.int1)
    if top_ks is not None:
        kth = _element(logit, tl.minimum(tl.maximum(k - 1, 0), count - 1), index)
        is_exact &= (k <= 0) | is_complete | (tl.sum(kept.to(tl.int64), 0) >= k)
        is_complete |= k > 0
        kept &= logit >= tl.where(k > 0, kth, -float("inf"))
        mass = tl.where(kept, mass, 0.0)
        total = tl.where(is_complete, tl.sum(mass, 0), total)
    if top_ps is not None:
        threshold = tl.where(p < 1, p * total, float("inf"))
        is_exact &= (p >= 1) | is_complete | (tl.sum(mass, 0) >= threshold)
        is_complete |= p < 1
        kept &= (tl.cumsum(mass, 0) - mass < threshold) | (index == 0)
        mass = tl.where(kept, mass, 0.0)
        total = tl.where(is_complete, tl.sum(mass, 0), total)
    num_kept = tl.sum(kept.to(tl.int64), 0)
    is_exact &= is_complete | (num_kept >= top_n)
    ratio = exponential_noise(noise_key, token) * tl.exp(-logit)  # E / p
    at = tl.argmin(tl.where(kept, ratio, float("inf")), 0)
    drawn, drawn_value = _element(token, at, index), _element(value, at, index)
    rank = 1 + tl.sum((kept & (value > drawn_value)).to(tl.int64), 0)
    is_valid = tl.abs(max_score) < float("inf")
    if is_valid & (is_exact == 0):  # the list is too short
        line = scores + row.to(tl.int64) * stride, vocab_size, max_score, temperature
        last_key = _search(line, k, p, block_size)
        num_kept, total = _kept(line, last_key, block_size)
        drawn = _draw(line, noise_key, last_key, block_size)
        drawn_value = tl.load(line[0] + drawn).to(tl.float32)
        rank = 1 + _kept(line, _key(drawn_value, 0) - 1, block_size)[0]
    nth = _element(logit, tl.minimum(tl.maximum(top_n - 1, 0), count - 1), index)
    is_top = (index < max_top) & (index < num_kept) & (logit >= nth)
    table += row * (_COLUMNS + 2 * max_top)
    tl.store(table, drawn.to(tl.float64))
    tl.store(table + 1, tl.where(is_valid, 0.0, _INVALID).to(tl.float64))
    tl.store(table + 2, (drawn_value.to(tl.float64) - max_score) / temperature - tl.log(total))
    tl.store(table + 3, rank.to(tl.float64))
    tl.store(table + 4, tl.sum(is_top.to(tl.int32), 0).to(tl.float64))
    tl.store(table + _COLUMNS + index, token.to(tl.float64), mask=index < max_top)
    tl.store(table + _COLUMNS + max_top + index, logit - tl.log(total), mask=index < max_top)


@triton.jit
def _search(line: tl.tuple, k: tl.tensor, p: tl.tensor, block_size: tl.constexpr) -> tl.tensor:
    """The key of the last token that top_k and top_p keep of a line, found by bisection."""
    last_key, best_key = tl.full([], _LAST_KEY, tl.int64), _key(line[2], 0)
    if k > 0:  # tokens that tie with the k-th are kept
        low, high = (best_key >> 32) - 1, last_key >> 32
        for _ in range(32):
            middle = (low + high) >> 1
            count, _mass = _kept(line, middle << 32 | _LAST_ID, block_size)
            low, high = tl.where(count < k, middle, low), tl.where(count < k, high, middle)
        last_key = high << 32 | _LAST_ID
    if p < 1:
        _count, total = _kept(line, last_key, block_size)
        threshold, low = tl.maximum(p * total, 1e-300), best_key - 1
        for _ in range(64):
            middle = (low & last_key) + ((low ^ last_key) >> 1)  # the mean, whose sum may not fit
            _count, mass = _kept(line, middle, block_size)
            low, last_key = tl.where(mass < threshold, middle, low), tl.where(mass < threshold, last_key, middle)
    return last_key


@triton.jit
def _kept(line: tl.tuple, last_key: tl.tensor, block_size: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """The number of tokens of a line up to a key, and their mass."""
    scores, vocab_size, max_score, temperature = line
    count, mass = tl.zeros([block_size], tl.int64), tl.zeros([block_size], tl.float64)
    for start in range(0, vocab_size, block_size):
        ids = start + tl.arange(0, block_size)
        value = tl.load(scores + ids, mask=ids < vocab_size, other=-float("inf")).to(tl.float32)
        kept = (value > -float("inf")) & (_key(value, ids) <= last_key)
        count += kept.to(tl.int64)
        mass += tl.where(kept, tl.exp((value.to(tl.float64) - max_score) / temperature), 0.0)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
def _draw(line: tl.tuple, noise_key: tl.tensor, last_key: tl.tensor, block_size: tl.constexpr) -> tl.tensor:
    """The id of the token that is drawn from those of a line up to a key."""
    scores, vocab_size, max_score, temperature = line
    least, first = tl.full([block_size], float("inf"), tl.float64), tl.zeros([block_size], tl.int64)
    for start in range(0, vocab_size, block_size):
        ids = start + tl.arange(0, block_size)
        value = tl.load(scores + ids, mask=ids < vocab_size, other=-float("inf")).to(tl.float32)
        ratio = exponential_noise(noise_key, ids) * tl.exp((max_score - value.to(tl.float64)) / temperature)  # E / p
        is_less = (value > -float("inf")) & (_key(value, ids) <= last_key) & (ratio < least)
        least, first = tl.where(is_less, ratio, least), tl.where(is_less, ids, first)
    return _element(first, tl.argmin(least, 0), tl.arange(0, block_size))


@triton.jit
def _key(value: tl.tensor, ids: tl.tensor) -> tl.tensor:
    """Integers in the order of a list: by descending value, equal ones by ascending id; -0.0 and 0.0 are equal."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    return (~(bits ^ ((bits >> 31) & _LOWEST_BITS))).to(tl.int64) << 32 | ids


@triton.jit
def _sorted(values: tl.tensor, ids: tl.tensor, index: tl.tensor, is_listed: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Values and ids in the order of their keys."""
    value, token = tl.load(values + index, mask=is_listed, other=0.0), tl.load(ids + index, mask=is_listed, other=0)
    key = tl.sort(tl.where(is_listed, _key(value, token), _LAST_KEY))
    bits = ~(key >> 32).to(tl.int32)
    return (bits ^ ((bits >> 31) & _LOWEST_BITS)).to(tl.float32, bitcast=True), key & _LAST_ID


@triton.jit
def _element(vector: tl.tensor, at: tl.tensor, index: tl.tensor) -> tl.tensor:
    return tl.sum(tl.where(index == at, vector, 0), 0)
