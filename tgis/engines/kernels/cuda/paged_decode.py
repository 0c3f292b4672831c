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
from tgis.engines.kernels.cuda.paged_prefill import LOG2_E, MIN_DOT, NO_WINDOW, add_tile, attention_scores, biases

_TILE_BYTES = 16384  # of keys per loop iteration
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
    (num_seqs, num_heads, k_size), (block_size, num_kv_heads, v_size) = q.shape, value_cache.shape[1:]
    assert q.dtype == key_cache.dtype == value_cache.dtype
    assert q.stride(2) == block_tables.stride(1) == 1
    assert all(tensor.is_contiguous() for tensor in (key_cache, value_cache, seq_lens))
    group_size = num_heads // num_kv_heads
    block_m, block_k, block_v = (max(triton.next_power_of_2(size), MIN_DOT) for size in (group_size, k_size, v_size))
    block_m = min(block_m, 128 // q.element_size())  # more would not fit into shared memory
    tile_tokens = _TILE_BYTES // (max(block_k, block_v) * q.element_size())
    tile = min(max(tile_tokens, MIN_DOT), _MAX_TILE_TOKENS)
    programs_per_split = num_kv_heads * triton.cdiv(group_size, block_m)
    num_splits = num_seqs + triton.cdiv(_PROGRAMS_PER_SM * num_sms, programs_per_split)
    output = torch.empty(num_seqs, num_heads, v_size, dtype=q.dtype, device=q.device)
    split_outputs = torch.empty(num_splits, num_heads, v_size, dtype=torch.float32, device=q.device)
    split_lse = torch.empty(num_splits, num_heads, dtype=torch.float32, device=q.device)
    results = seq_lens, params.sinks, output, split_outputs, split_lse
    partition = num_seqs, num_splits, NO_WINDOW if params.window is None else params.window
    padded_seqs = max(triton.next_power_of_2(num_seqs), _MIN_PADDED_SEQS)
    sizes = {"padded_seqs": padded_seqs, "tile": tile, "v_size": v_size, "block_v": block_v}
    _split_attention[programs_per_split, num_splits](
        *results,
        *partition,
        *(q, key_cache, value_cache, block_tables, q.stride(0), q.stride(1), block_tables.stride(0), params.scale),
        params.bias,
        **sizes,
        num_heads=num_heads,
        group_size=group_size,
        k_size=k_size,
        block_size=block_size,
        softcap=params.softcap,
        bias_row=0 if params.bias is None else params.bias.stride(0),
        bias_origin=params.bias_origin,
        block_m=block_m,
        block_k=block_k,
        num_warps=8 if block_m * block_v > 8192 else 4,
        num_stages=3 if block_m == MIN_DOT else 2,
    )
    # No more sequences have several splits than there are spare ones.
    _combine_splits[min(num_seqs, num_splits - num_seqs), num_heads](*results, *partition, **sizes)
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
    q: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    block_tables: tl.tensor,
    q_seq_stride: tl.tensor,
    q_head_stride: tl.tensor,
    table_stride: tl.tensor,
    scale: tl.tensor,
    bias: tl.tensor,
    padded_seqs: tl.constexpr,
    tile: tl.constexpr,
    v_size: tl.constexpr,
    block_v: tl.constexpr,
    num_heads: tl.constexpr,
    group_size: tl.constexpr,
    k_size: tl.constexpr,
    block_size: tl.constexpr,
    softcap: tl.constexpr,
    bias_row: tl.constexpr,
    bias_origin: tl.constexpr,
    block_m: tl.constexpr,
    block_k: tl.constexpr,
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

    num_kv_heads: tl.constexpr = num_heads // group_size
    programs_per_group: tl.constexpr = (group_size + block_m - 1) // block_m
    kv_head = tl.program_id(0) // programs_per_group
    member = tl.program_id(0) % programs_per_group * block_m + tl.arange(0, block_m)
    head, is_head = kv_head * group_size + member, member < group_size
    k_offsets, v_offsets = tl.arange(0, block_k), tl.arange(0, block_v)
    q_mask = is_head[:, None] & (k_offsets < k_size)
    query = tl.load(q + seq * q_seq_stride + head[:, None] * q_head_stride + k_offsets, mask=q_mask, other=0.0)
    running_max = tl.full([block_m], float("-inf"), tl.float32)
    running_sum = tl.zeros([block_m], tl.float32)
    acc = tl.zeros([block_m, block_v], tl.float32)
    # The block ids of the next iteration are loaded in this one, so that its loads of keys need not wait for them.
    block_table = block_tables + seq * table_stride
    token = begin + tl.arange(0, tile)
    next_blocks = tl.load(block_table + token // block_size, mask=token < end, other=0)
    for start in range(begin, end, tile):
        token = start + tl.arange(0, tile)
        is_visible = token < end
        slot = (next_blocks.to(tl.int64) * block_size + token % block_size) * num_kv_heads + kv_head
        next_blocks = tl.load(block_table + (token + tile) // block_size, mask=token + tile < end, other=0)
        k_mask = is_visible & (k_offsets[:, None] < k_size)
        k = tl.load(key_cache + slot * k_size + k_offsets[:, None], mask=k_mask, other=0.0)  # [block_k, tile]
        scores = attention_scores(query, k, scale, softcap)  # [block_m, tile]
        if bias is not None:
            rows = bias + head[:, None] * bias_row
            scores += biases(rows, seq_len - 1, token, bias_origin, is_head[:, None] & is_visible)
        scores = tl.where(is_visible, scores, float("-inf"))
        v_mask = is_visible[:, None] & (v_offsets < v_size)
        v = tl.load(value_cache + slot[:, None] * v_size + v_offsets, mask=v_mask, other=0.0)  # [tile, block_v]
        acc, running_max, running_sum = add_tile(scores, v, acc, running_max, running_sum)

    running_sum = tl.maximum(running_sum, 1.0)  # below 1 only for a sequence of length 0
    out_offsets = head[:, None] * v_size + v_offsets
    out_mask = is_head[:, None] & (v_offsets < v_size)
    if count == 1:
        if sinks is not None:
            sink = tl.load(sinks + head, mask=is_head, other=0.0).to(tl.float32)
            running_sum += tl.exp2(sink * LOG2_E - running_max)
        finished = (acc / running_sum[:, None]).to(output.dtype.element_ty)
        tl.store(output + seq * num_heads * v_size + out_offsets, finished, mask=out_mask)
    else:
        tl.store(split_outputs + split * num_heads * v_size + out_offsets, acc / running_sum[:, None], mask=out_mask)
        tl.store(split_lse + split * num_heads + head, running_max + tl.log2(running_sum), mask=is_head)


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
    padded_seqs: tl.constexpr,
    tile: tl.constexpr,
    v_size: tl.constexpr,
    block_v: tl.constexpr,
) -> None:
    """Combine the splits of one sequence for one head: their mean, weighted by log-sum-exp."""
    nth, head, num_heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    counts, firsts, _ = _partition_splits(seq_lens, num_seqs, num_splits, window, padded_seqs, tile)
    number = tl.cumsum((counts > 1).to(tl.int32), 0)  # of such sequences, up to each
    if nth >= tl.max(number, 0):
        return
    seq = tl.sum((number <= nth).to(tl.int32), 0)
    count, first = _element(counts, seq, padded_seqs), _element(firsts, seq, padded_seqs)
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
        mask = (split < count)[:, None] & (v_offsets < v_size)
        outputs = tl.load(split_outputs + index[:, None] * v_size + v_offsets, mask=mask, other=0.0)
        acc = acc * rescale + tl.sum(outputs * weights[:, None], 0)
        running_sum, running_max = running_sum * rescale + tl.sum(weights, 0), new_max
    if sinks is not None:
        running_sum += tl.exp2(tl.load(sinks + head).to(tl.float32) * LOG2_E - running_max)
    finished = (acc / running_sum).to(output.dtype.element_ty)
    tl.store(output + (seq * num_heads + head) * v_size + v_offsets, finished, mask=v_offsets < v_size)
