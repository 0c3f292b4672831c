# mypy: disallow-untyped-decorators=False
"""Decode attention over a paged KV cache in Triton: one new token per sequence, bound by memory bandwidth.

Split-KV ("flash decoding"): the visible tokens of all sequences are cut on the device into splits of equal size, at
most as many as the grid has. The launch depends on shapes alone, so a captured CUDA graph can be replayed with other
block tables and lengths. A program computes one split for the query heads that share a KV head; a second kernel
combines the splits of each sequence.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tgis.engines.kernels.attention_inputs import AttentionParams
from tgis.engines.kernels.cuda import attention_tile

_TILE_BYTES = 16384  # bytes of keys per loop iteration
_MAX_TILE_TOKENS = 128
_PROGRAMS_PER_SM = 4
_MIN_PADDED_SEQS = 256  # kernels are compiled per power of two of sequences: fewer variants


def paged_decode(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    params: AttentionParams,
    num_sms: int,
) -> Tensor:
    """The output [B, H, E] of queries [B, H, D], each the last of its sequence's `seq_lens` [B] tokens.

    `key_cache` [blocks, block size, K, D] and `value_cache` [blocks, block size, K, E] are contiguous and of q's dtype;
    `block_tables` [B, max blocks] and `seq_lens` are int32 or int64. A sequence of length 0 reads nothing and yields
    zeros. All tensors are on the current device, which has `num_sms` streaming multiprocessors.
    """
    num_seqs, shape = len(q), attention_tile.AttentionShape.of(q, key_cache, value_cache, params)
    assert block_tables.stride(1) == seq_lens.stride(0) == 1
    group_size, min_dot = shape.num_heads // shape.num_kv_heads, attention_tile.MIN_DOT
    block_m = min(max(triton.next_power_of_2(group_size), min_dot), 128 // q.element_size())  # fits into shared memory
    tile_tokens = _TILE_BYTES // (max(shape.block_k, shape.block_v) * q.element_size())
    tile = min(max(tile_tokens, min_dot), _MAX_TILE_TOKENS)
    programs_per_split = shape.num_kv_heads * triton.cdiv(group_size, block_m)
    num_splits = num_seqs + triton.cdiv(_PROGRAMS_PER_SM * num_sms, programs_per_split)
    output = q.new_empty(num_seqs, shape.num_heads, shape.v_size)
    split_outputs = q.new_empty(num_splits, shape.num_heads, shape.v_size, dtype=torch.float32)
    split_lse = q.new_empty(num_splits, shape.num_heads, dtype=torch.float32)
    results = seq_lens, params.sinks, output, split_outputs, split_lse
    window = attention_tile.NO_WINDOW if params.window is None else params.window
    padded_seqs = max(triton.next_power_of_2(num_seqs), _MIN_PADDED_SEQS)
    partition = num_seqs, num_splits, window, shape, padded_seqs, tile
    _split_attention[programs_per_split, num_splits](
        *(*results, *partition, q, key_cache, value_cache, block_tables),
        *(q.stride(0), q.stride(1), block_tables.stride(0), params.scale, params.bias),
        block_m=block_m,
        num_warps=8 if block_m * shape.block_v > 8192 else 4,
        num_stages=3 if block_m == min_dot else 2,
    )
    # No more sequences have several splits than there are spare ones.
    _combine_splits[min(num_seqs, num_splits - num_seqs), shape.num_heads](*results, *partition)
    return output


@triton.jit
def _partition_splits(
    seq_lens: tl.tensor,
    num_seqs: tl.tensor,
    num_splits: tl.tensor,
    window: tl.tensor,
    padded_seqs: tl.constexpr,
    tile: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The number of splits of each sequence, the index of its first one, and the number of tokens in a split.

    Every sequence has a split; spare ones go to sequences that see more than an equal share of all tokens.
    """
    index = tl.arange(0, padded_seqs)
    visible = tl.minimum(tl.load(seq_lens + index, mask=index < num_seqs, other=0), window).to(tl.int32)
    size = tl.maximum(tl.cdiv(tl.cdiv(tl.sum(visible, 0), num_splits - num_seqs), tile), 1) * tile
    counts = tl.where(index < num_seqs, tl.maximum(tl.cdiv(visible, size), 1), 0)
    return counts, tl.cumsum(counts, 0) - counts, size


@triton.jit
def _element(vector: tl.tensor, index: tl.tensor, size: tl.constexpr) -> tl.tensor:
    return tl.sum(tl.where(tl.arange(0, size) == index, vector, 0), 0)


@triton.jit(do_not_specialize=["num_seqs", "num_splits", "window", "table_stride"])
def _split_attention(
    seq_lens: tl.tensor,
    sinks: tl.tensor,
    output: tl.tensor,
    split_outputs: tl.tensor,
    split_lse: tl.tensor,
    num_seqs: tl.tensor,
    num_splits: tl.tensor,
    window: tl.tensor,
    shape: tl.constexpr,
    padded_seqs: tl.constexpr,
    tile: tl.constexpr,
    q: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    block_tables: tl.tensor,
    q_seq_stride: tl.tensor,
    q_head_stride: tl.tensor,
    table_stride: tl.tensor,
    scale: tl.tensor,
    bias: tl.tensor,
    block_m: tl.constexpr,
) -> None:
    """Compute one split for `block_m` query heads of one KV head; a sequence with a single split is finished here."""
    split = tl.program_id(1)
    counts, firsts, size = _partition_splits(seq_lens, num_seqs, num_splits, window, padded_seqs, tile)
    seq = tl.sum((firsts + counts <= split).to(tl.int32), 0)
    if seq >= num_seqs:
        return
    count, first = _element(counts, seq, padded_seqs), _element(firsts, seq, padded_seqs)
    seq_len = tl.load(seq_lens + seq).to(tl.int32)
    begin = tl.maximum(seq_len - window, 0) + (split - first) * size
    end = tl.minimum(begin + size, seq_len)

    group_size: tl.constexpr = shape.num_heads // shape.num_kv_heads
    programs_per_group: tl.constexpr = (group_size + block_m - 1) // block_m
    kv_head = tl.program_id(0) // programs_per_group
    member = tl.program_id(0) % programs_per_group * block_m + tl.arange(0, block_m)
    head, is_head = kv_head * group_size + member, member < group_size
    block_v: tl.constexpr = shape.block_v
    k_offsets, v_offsets = tl.arange(0, shape.block_k), tl.arange(0, block_v)
    q_mask = is_head[:, None] & (k_offsets < shape.k_size)
    query = tl.load(q + seq * q_seq_stride + head[:, None] * q_head_stride + k_offsets, mask=q_mask, other=0.0)
    running_max = tl.full([block_m], float("-inf"), tl.float32)
    running_sum = tl.zeros([block_m], tl.float32)
    acc = tl.zeros([block_m, block_v], tl.float32)
    # The block ids of the next iteration are loaded in this one, so that its loads of keys need not wait for them.
    block_table = block_tables + seq * table_stride
    token = begin + tl.arange(0, tile)
    next_blocks = tl.load(block_table + token // shape.block_size, mask=token < end, other=0)
    for start in range(begin, end, tile):
        token = start + tl.arange(0, tile)
        is_visible = token < end
        slot = (next_blocks.to(tl.int64) * shape.block_size + token % shape.block_size) * shape.num_kv_heads + kv_head
        next_blocks = tl.load(block_table + (token + tile) // shape.block_size, mask=token + tile < end, other=0)
        k_mask = is_visible & (k_offsets[:, None] < shape.k_size)
        k = tl.load(key_cache + slot * shape.k_size + k_offsets[:, None], mask=k_mask, other=0.0)  # [block_k, tile]
        scores = attention_tile.scores_of(query, k, scale, shape)  # [block_m, tile]
        if bias is not None:
            is_added = is_head[:, None] & is_visible
            scores += attention_tile.biases(bias, head[:, None], seq_len - 1, token, is_added, shape)
        scores = tl.where(is_visible, scores, float("-inf"))
        v_mask = is_visible[:, None] & (v_offsets < shape.v_size)
        v = tl.load(value_cache + slot[:, None] * shape.v_size + v_offsets, mask=v_mask, other=0.0)  # [tile, block_v]
        acc, running_max, running_sum = attention_tile.add(scores, v, acc, running_max, running_sum)

    running_sum = tl.maximum(running_sum, 1.0)  # below 1 only for a sequence of length 0
    out_offsets = head[:, None] * shape.v_size + v_offsets
    out_mask = is_head[:, None] & (v_offsets < shape.v_size)
    if count == 1:
        if sinks is not None:
            sink = tl.load(sinks + head, mask=is_head, other=0.0).to(tl.float32)
            running_sum += tl.exp2(sink * attention_tile.LOG2_E - running_max)
        finished = (acc / running_sum[:, None]).to(output.dtype.element_ty)
        tl.store(output + seq * shape.num_heads * shape.v_size + out_offsets, finished, mask=out_mask)
    else:
        split_output = split_outputs + split * shape.num_heads * shape.v_size
        tl.store(split_output + out_offsets, acc / running_sum[:, None], mask=out_mask)
        tl.store(split_lse + split * shape.num_heads + head, running_max + tl.log2(running_sum), mask=is_head)


@triton.jit(do_not_specialize=["num_seqs", "num_splits", "window"])
def _combine_splits(
    seq_lens: tl.tensor,
    sinks: tl.tensor,
    output: tl.tensor,
    split_outputs: tl.tensor,
    split_lse: tl.tensor,
    num_seqs: tl.tensor,
    num_splits: tl.tensor,
    window: tl.tensor,
    shape: tl.constexpr,
    padded_seqs: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """Combine the splits of one sequence for one head: their mean, weighted by log-sum-exp."""
    nth, head, num_heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    counts, firsts, _ = _partition_splits(seq_lens, num_seqs, num_splits, window, padded_seqs, tile)
    number = tl.cumsum((counts > 1).to(tl.int32), 0)  # running count of sequences with several splits
    if nth >= tl.max(number, 0):
        return
    seq = tl.sum((number <= nth).to(tl.int32), 0)
    count, first = _element(counts, seq, padded_seqs), _element(firsts, seq, padded_seqs)
    block_v: tl.constexpr = shape.block_v
    v_offsets = tl.arange(0, block_v)
    running_max = tl.full([1], float("-inf"), tl.float32)
    running_sum = tl.zeros([1], tl.float32)
    acc = tl.zeros([block_v], tl.float32)
    for start in range(0, count, 16):
        split = start + tl.arange(0, 16)
        index = (first + split) * num_heads + head
        lse = tl.load(split_lse + index, mask=split < count, other=float("-inf"))
        new_max = tl.maximum(running_max, tl.max(lse, 0))
        weights, rescale = tl.exp2(lse - new_max), tl.exp2(running_max - new_max)
        mask = (split < count)[:, None] & (v_offsets < shape.v_size)
        outputs = tl.load(split_outputs + index[:, None] * shape.v_size + v_offsets, mask=mask, other=0.0)
        acc = acc * rescale + tl.sum(outputs * weights[:, None], 0)
        running_sum, running_max = running_sum * rescale + tl.sum(weights, 0), new_max
    if sinks is not None:
        running_sum += tl.exp2(tl.load(sinks + head).to(tl.float32) * attention_tile.LOG2_E - running_max)
    finished = (acc / running_sum).to(output.dtype.element_ty)
    tl.store(output + (seq * num_heads + head) * shape.v_size + v_offsets, finished, mask=v_offsets < shape.v_size)
