# mypy: disallow-untyped-decorators=False
"""Decode attention over the paged KV cache in Triton, for CUDA: one new token a row, made to run at memory speed.

What the rows see is cut into items of equal size, on the device, and into no more of them than the grid has: the launch
depends on shapes alone, so a CUDA graph of it can be replayed with other tables and lengths. A program takes one item
and the query heads that share a KV head; then what belongs to one row is put together.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_LOG2_E = tl.constexpr(1.4426950408889634)
_NO_WINDOW = 2**31 - 1
_MIN_DOT = 16
_TILE_BYTES = 16384  # of keys that one turn of the loop reads
_MAX_TILE_TOKENS = 128  # tokens
_PROGRAMS_PER_SM = 4
_MIN_PADDED_ROWS = 256  # for the kernels are compiled for each number of them


def paged_decode(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    num_sms: int,
) -> Tensor:
    """The output [B, H, E] of queries [B, H, D], each of which is the last of its row's `lengths` [B] tokens.

    `keys` [blocks, block size, K, D] and `values` [blocks, block size, K, E] are contiguous and of q's dtype; `tables`
    [B, most blocks] and `lengths` are int32 or int64. A row of length 0 reads nothing and gives zeros. All tensors are
    on the current device, which has so many (multi)processors.
    """
    (rows, heads, k_size), (block, kv_heads, v_size) = q.shape, value_cache.shape[1:]
    assert q.dtype == key_cache.dtype == value_cache.dtype
    assert q.stride(2) == block_tables.stride(1) == 1
    assert all(tensor.is_contiguous() for tensor in (key_cache, value_cache, seq_lens))
    group = heads // kv_heads
    m, d, e = (max(triton.next_power_of_2(size), _MIN_DOT) for size in (group, k_size, v_size))
    m = min(m, 128 // q.element_size())  # more would not fit into shared memory
    tile = min(max(_TILE_BYTES // (max(d, e) * q.element_size()), _MIN_DOT), _MAX_TILE_TOKENS)
    programs = kv_heads * triton.cdiv(group, m)  # for one item
    items = rows + triton.cdiv(_PROGRAMS_PER_SM * num_sms, programs)
    output = torch.empty(rows, heads, v_size, dtype=q.dtype, device=q.device)
    partial = torch.empty(items, heads, v_size, dtype=torch.float32, device=q.device)
    sums = torch.empty(items, heads, dtype=torch.float32, device=q.device)
    results = seq_lens, sinks, output, partial, sums
    shares = rows, items, _NO_WINDOW if window is None else window
    padded_rows = max(triton.next_power_of_2(rows), _MIN_PADDED_ROWS)
    sizes = {"padded_rows": padded_rows, "tile": tile, "v_size": v_size, "e": e}
    _split_attention[programs, items](
        *results,
        *shares,
        *(q, key_cache, value_cache, block_tables, q.stride(0), q.stride(1), block_tables.stride(0), scale),
        **sizes,
        heads=heads,
        group=group,
        k_size=k_size,
        block=block,
        softcap=softcap,
        m=m,
        d=d,
        num_warps=8 if m * e > 8192 else 4,
        num_stages=3 if m == _MIN_DOT else 2,
    )
    _combine_splits[rows, heads](*results, *shares, **sizes)
    return output


@triton.jit
def _partition_splits(
    lengths: tl.tensor,
    rows: tl.tensor,
    items: tl.tensor,
    window: tl.tensor,
    padded_rows: tl.constexpr,
    tile: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """How many items each row has, the number of its first one, and how many tokens one has.

    Every row has one; those to spare go where a row sees more than an equal share of all tokens.
    """
    index = tl.arange(0, padded_rows)
    seen = tl.minimum(tl.load(lengths + index, mask=index < rows, other=0), window).to(tl.int32)
    size = tl.maximum(tl.cdiv(tl.cdiv(tl.sum(seen, 0), items - rows), tile), 1) * tile
    counts = tl.where(index < rows, tl.maximum(tl.cdiv(seen, size), 1), 0)
    return counts, tl.cumsum(counts, 0) - counts, size


@triton.jit
def _element(vector: tl.tensor, place: tl.tensor, size: tl.constexpr) -> tl.tensor:
    return tl.sum(tl.where(tl.arange(0, size) == place, vector, 0), 0)


@triton.jit(do_not_specialize=["rows", "items", "window", "table_row"])
def _split_attention(
    lengths: tl.tensor,
    sinks: tl.tensor,
    output: tl.tensor,
    partial: tl.tensor,
    sums: tl.tensor,
    rows: tl.tensor,
    items: tl.tensor,
    window: tl.tensor,
    q: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    tables: tl.tensor,
    q_row: tl.tensor,
    q_head: tl.tensor,
    table_row: tl.tensor,
    scale: tl.tensor,
    padded_rows: tl.constexpr,
    tile: tl.constexpr,
    v_size: tl.constexpr,
    e: tl.constexpr,
    heads: tl.constexpr,
    group: tl.constexpr,
    k_size: tl.constexpr,
    block: tl.constexpr,
    softcap: tl.constexpr,
    m: tl.constexpr,
    d: tl.constexpr,
) -> None:
    """One item, for m query heads of one KV head; a row of one item is finished here."""
    item = tl.program_id(1)
    counts, firsts, size = _partition_splits(lengths, rows, items, window, padded_rows, tile)
    row = tl.sum((firsts + counts <= item).to(tl.int32), 0)
    if row >= rows:
        return
    count, first = _element(counts, row, padded_rows), _element(firsts, row, padded_rows)
    length = tl.load(lengths + row).to(tl.int32)
    begin = tl.maximum(length - window, 0) + (item - first) * size
    end = tl.minimum(begin + size, length)

    kv_heads: tl.constexpr = heads // group
    parts: tl.constexpr = (group + m - 1) // m
    kv_head = tl.program_id(0) // parts
    member = tl.program_id(0) % parts * m + tl.arange(0, m)
    head, is_head = kv_head * group + member, member < group
    at_d, at_e = tl.arange(0, d), tl.arange(0, e)
    is_query = is_head[:, None] & (at_d < k_size)
    query = tl.load(q + row * q_row + head[:, None] * q_head + at_d, mask=is_query, other=0.0)
    top = tl.full([m], float("-inf"), tl.float32)
    total = tl.zeros([m], tl.float32)
    mixed = tl.zeros([m, e], tl.float32)
    # Which blocks the next turn reads is looked up in this one: its loads of keys need not wait for that then.
    table = tables + row * table_row
    token = begin + tl.arange(0, tile)
    upcoming = tl.load(table + token // block, mask=token < end, other=0)
    for start in range(begin, end, tile):
        token = start + tl.arange(0, tile)
        seen = token < end
        place = (upcoming.to(tl.int64) * block + token % block) * kv_heads + kv_head
        upcoming = tl.load(table + (token + tile) // block, mask=token + tile < end, other=0)
        is_key = seen & (at_d[:, None] < k_size)
        k = tl.load(keys + place * k_size + at_d[:, None], mask=is_key, other=0.0)  # [d, tile]
        scores = tl.dot(query, k, input_precision="ieee") * scale  # [m, tile]
        if softcap is not None:
            scores = softcap * (1 - 2 / (1 + tl.exp(scores * (2 / softcap))))  # softcap * tanh(scores / softcap)
        scores = tl.where(seen, scores * _LOG2_E, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights, fade = tl.exp2(scores - new_top[:, None]), tl.exp2(top - new_top)
        is_value = seen[:, None] & (at_e < v_size)
        v = tl.load(values + place[:, None] * v_size + at_e, mask=is_value, other=0.0)  # [tile, e]
        mixed = tl.dot(weights.to(v.dtype), v, mixed * fade[:, None], input_precision="ieee")
        total, top = total * fade + tl.sum(weights, 1), new_top

    total = tl.maximum(total, 1.0)  # is at least that already, but for a row of length 0
    at_output = head[:, None] * v_size + at_e
    is_output = is_head[:, None] & (at_e < v_size)
    if count == 1:
        if sinks is not None:
            total += tl.exp2(tl.load(sinks + head, mask=is_head, other=0.0).to(tl.float32) * _LOG2_E - top)
        finished = (mixed / total[:, None]).to(output.dtype.element_ty)
        tl.store(output + row * heads * v_size + at_output, finished, mask=is_output)
    else:
        tl.store(partial + item * heads * v_size + at_output, mixed / total[:, None], mask=is_output)
        tl.store(sums + item * heads + head, top + tl.log2(total), mask=is_head)


@triton.jit(do_not_specialize=["rows", "items", "window"])
def _combine_splits(
    lengths: tl.tensor,
    sinks: tl.tensor,
    output: tl.tensor,
    partial: tl.tensor,
    sums: tl.tensor,
    rows: tl.tensor,
    items: tl.tensor,
    window: tl.tensor,
    padded_rows: tl.constexpr,
    tile: tl.constexpr,
    v_size: tl.constexpr,
    e: tl.constexpr,
) -> None:
    """One head of one row: the mean of its items, weighted by the sums of their weights."""
    row, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    counts, firsts, _ = _partition_splits(lengths, rows, items, window, padded_rows, tile)
    count, first = _element(counts, row, padded_rows), _element(firsts, row, padded_rows)
    if count == 1:
        return
    at_e = tl.arange(0, e)
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    mixed = tl.zeros([e], tl.float32)
    for start in range(0, count, 16):
        item = start + tl.arange(0, 16)
        at = (first + item) * heads + head
        logs = tl.load(sums + at, mask=item < count, other=float("-inf"))
        new_top = tl.maximum(top, tl.max(logs, 0))
        weights, fade = tl.exp2(logs - new_top), tl.exp2(top - new_top)
        is_part = (item < count)[:, None] & (at_e < v_size)
        part = tl.load(partial + at[:, None] * v_size + at_e, mask=is_part, other=0.0)
        mixed = mixed * fade + tl.sum(part * weights[:, None], 0)
        total, top = total * fade + tl.sum(weights, 0), new_top
    if sinks is not None:
        total += tl.exp2(tl.load(sinks + head).to(tl.float32) * _LOG2_E - top)
    finished = (mixed / total).to(output.dtype.element_ty)
    tl.store(output + (row * heads + head) * v_size + at_e, finished, mask=at_e < v_size)
