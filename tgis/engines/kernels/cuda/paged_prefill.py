# mypy: disallow-untyped-decorators=False
"""Prefill attention over a paged KV cache in Triton, for what PyTorch's variable-length attention cannot compute: soft
caps, sinks, float32, keys and values of different widths, heads larger than 256.

A program computes a tile of queries of one chunk for one head, over tiles of keys that it reads from their blocks:
nothing is gathered, and no scores are in memory.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tgis.engines.kernels.attention_inputs import AttentionParams

LOG2_E = tl.constexpr(1.4426950408889634)  # softmax is computed to the base of 2
NO_WINDOW = 2**31 - 1
MIN_DOT = 16  # smallest dimension of tl.dot
_QUERY_BYTES, _KEY_BYTES = 16384, 16384  # of a tile


def paged_prefill(
    q: Tensor, key_cache: Tensor, value_cache: Tensor, sequences: Tensor, max_tokens: int, params: AttentionParams
) -> Tensor:
    """The output [T, H, E] of the chunks' queries [T, H, D].

    `sequences` is int64 [chunks, 4]: the first query, counted from any origin, the number of queries, up to
    `max_tokens`, which are the last tokens of the sequence, its length, and the address of its block table, int64.

    `key_cache` [blocks, block size, K, D] and `value_cache` [blocks, block size, K, E] are contiguous, of q's dtype,
    and hold the new keys and values already.
    """
    (num_tokens, num_heads, k_size), (block_size, num_kv_heads, v_size) = q.shape, value_cache.shape[1:]
    assert q.dtype == key_cache.dtype == value_cache.dtype
    assert q.stride(2) == 1
    assert key_cache.is_contiguous()
    assert value_cache.is_contiguous()
    block_k, block_v = (max(triton.next_power_of_2(size), MIN_DOT) for size in (k_size, v_size))
    token_bytes = max(block_k, block_v) * q.element_size()
    block_m = min(max(_QUERY_BYTES // token_bytes, MIN_DOT), 128)
    output = torch.empty(num_tokens, num_heads, v_size, dtype=q.dtype, device=q.device)
    _prefill_attention[triton.cdiv(max_tokens, block_m), num_heads, len(sequences)](
        *(output, q, key_cache, value_cache, params.sinks, params.bias, sequences),
        *(q.stride(0), q.stride(1), params.scale),
        NO_WINDOW if params.window is None else params.window,
        softcap=params.softcap,
        bias_row=0 if params.bias is None else params.bias.stride(0),
        bias_origin=params.bias_origin,
        causal=params.causal,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        k_size=k_size,
        v_size=v_size,
        block_size=block_size,
        block_m=block_m,
        tile=min(max(_KEY_BYTES // token_bytes, MIN_DOT), 64),
        block_k=block_k,
        block_v=block_v,
        num_warps=8 if block_m * block_v > 8192 else 4,
        num_stages=2,
    )
    return output


@triton.jit(do_not_specialize=["window"])
def _prefill_attention(
    output: tl.tensor,
    q: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    sinks: tl.tensor,
    bias: tl.tensor,
    sequences: tl.tensor,
    q_token_stride: tl.tensor,
    q_head_stride: tl.tensor,
    scale: tl.tensor,
    window: tl.tensor,
    softcap: tl.constexpr,
    bias_row: tl.constexpr,
    bias_origin: tl.constexpr,
    causal: tl.constexpr,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    k_size: tl.constexpr,
    v_size: tl.constexpr,
    block_size: tl.constexpr,
    block_m: tl.constexpr,
    tile: tl.constexpr,
    block_k: tl.constexpr,
    block_v: tl.constexpr,
) -> None:
    """Compute `block_m` queries of one chunk for one head; the last queries, which see the most, start first."""
    head, sequence = tl.program_id(1), sequences + 4 * tl.program_id(2)
    chunk_start, num_queries = tl.load(sequence) - tl.load(sequences), tl.load(sequence + 1).to(tl.int32)
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * block_m
    if first >= num_queries:
        return
    seq_len, block_table = tl.load(sequence + 2).to(tl.int32), tl.load(sequence + 3).to(tl.pointer_type(tl.int64))
    row = first + tl.arange(0, block_m)
    position = tl.minimum(seq_len - num_queries + row, seq_len - 1)  # rows beyond the chunk are like its last
    kv_head = head // (num_heads // num_kv_heads)
    k_offsets, v_offsets = tl.arange(0, block_k), tl.arange(0, block_v)
    token_of_row = (chunk_start + row)[:, None]
    q_mask = (row < num_queries)[:, None] & (k_offsets < k_size)
    query = tl.load(q + token_of_row * q_token_stride + head * q_head_stride + k_offsets, mask=q_mask, other=0.0)
    running_max = tl.full([block_m], float("-inf"), tl.float32)
    running_sum = tl.zeros([block_m], tl.float32)
    acc = tl.zeros([block_m, block_v], tl.float32)
    begin = tl.maximum(seq_len - num_queries + first - window + 1, 0)
    end = tl.minimum(seq_len - num_queries + first + block_m, seq_len) if causal else seq_len
    for start in range(begin, end, tile):
        token = start + tl.arange(0, tile)
        block = tl.load(block_table + token // block_size, mask=token < end, other=0)
        slot = (block * block_size + token % block_size) * num_kv_heads + kv_head
        k_mask = (token < end) & (k_offsets[:, None] < k_size)
        k = tl.load(key_cache + slot * k_size + k_offsets[:, None], mask=k_mask, other=0.0)  # [block_k, tile]
        distance = position[:, None] - token
        is_visible = (distance < window) & (token < end)
        if causal:
            is_visible &= distance >= 0
        scores = attention_scores(query, k, scale, softcap)  # [block_m, tile]
        if bias is not None:
            scores += biases(bias + head * bias_row, position[:, None], token, bias_origin, is_visible)
        scores = tl.where(is_visible, scores, float("-inf"))
        v_mask = (token < end)[:, None] & (v_offsets < v_size)
        v = tl.load(value_cache + slot[:, None] * v_size + v_offsets, mask=v_mask, other=0.0)  # [tile, block_v]
        acc, running_max, running_sum = add_tile(scores, v, acc, running_max, running_sum)

    if sinks is not None:
        running_sum += tl.exp2(tl.load(sinks + head).to(tl.float32) * LOG2_E - running_max)
    finished = (acc / running_sum[:, None]).to(output.dtype.element_ty)
    out_mask = (row < num_queries)[:, None] & (v_offsets < v_size)
    tl.store(output + (token_of_row * num_heads + head) * v_size + v_offsets, finished, mask=out_mask)


@triton.jit
def attention_scores(query: tl.tensor, k: tl.tensor, scale: tl.tensor, softcap: tl.constexpr) -> tl.tensor:
    """The scores of queries [m, d] and keys [d, n], times log2(e)."""
    scores = tl.dot(query, k, input_precision="ieee") * scale
    if softcap is not None:
        scores = softcap * (1 - 2 / (1 + tl.exp(scores * (2 / softcap))))  # softcap * tanh(scores / softcap)
    return scores * LOG2_E


@triton.jit
def biases(
    rows: tl.tensor, position: tl.tensor, token: tl.tensor, bias_origin: tl.constexpr, mask: tl.tensor
) -> tl.tensor:
    """What rows of the bias add to the scores of the keys of these tokens for queries at these positions."""
    column = token if bias_origin is None else token - position + bias_origin
    return tl.load(rows + column, mask=mask, other=0.0) * LOG2_E


@triton.jit
def add_tile(
    scores: tl.tensor, v: tl.tensor, acc: tl.tensor, running_max: tl.tensor, running_sum: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """One step of online softmax: the weighted sum of values, the highest score and the sum of weights, once a tile
    [m, n] of scores and its values [n, e] have been added. Rows may have seen no key.
    """
    new_max = tl.maximum(running_max, tl.max(scores, 1))
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights, rescale = tl.exp2(scores - shift[:, None]), tl.exp2(running_max - shift)
    acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
    return acc, new_max, running_sum * rescale + tl.sum(weights, 1)
