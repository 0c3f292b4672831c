# mypy: disallow-untyped-decorators=False
"""Prefill attention over a paged KV cache in Triton, for what PyTorch's variable-length attention cannot compute: soft
caps, sinks, float32, keys and values of different widths, heads larger than 256.

A program computes a tile of queries of one chunk for one head, over tiles of keys that it reads from their blocks:
nothing is gathered, and no scores are in memory.
"""

import triton
import triton.language as tl
from torch import Tensor

from tgis.engines.kernels.attention_inputs import AttentionParams
from tgis.engines.kernels.cuda import attention_tile

_QUERY_BYTES, _KEY_BYTES = 16384, 16384  # bytes of queries and of keys in a tile


def paged_prefill(
    q: Tensor, key_cache: Tensor, value_cache: Tensor, sequences: Tensor, max_tokens: int, params: AttentionParams
) -> Tensor:
    """The output [T, H, E] of the chunks' queries [T, H, D].

    `sequences` is int64 [chunks, 4]: the first query, counted from any origin, the number of queries, up to
    `max_tokens`, which are the last tokens of the sequence, its length, and the address of its block table, int64.

    `key_cache` [blocks, block size, K, D] and `value_cache` [blocks, block size, K, E] are contiguous, of q's dtype,
    and hold the new keys and values already.
    """
    shape = attention_tile.AttentionShape.of(q, key_cache, value_cache, params)
    token_bytes = max(shape.block_k, shape.block_v) * q.element_size()
    block_m = min(max(_QUERY_BYTES // token_bytes, attention_tile.MIN_DOT), 128)
    output = q.new_empty(len(q), shape.num_heads, shape.v_size)
    _prefill_attention[triton.cdiv(max_tokens, block_m), shape.num_heads, len(sequences)](
        *(output, q, key_cache, value_cache, params.sinks, params.bias, sequences),
        *(q.stride(0), q.stride(1), params.scale),
        attention_tile.NO_WINDOW if params.window is None else params.window,
        shape,
        block_m=block_m,
        tile=min(max(_KEY_BYTES // token_bytes, attention_tile.MIN_DOT), 64),
        num_warps=8 if block_m * shape.block_v > 8192 else 4,
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
    shape: tl.constexpr,
    block_m: tl.constexpr,
    tile: tl.constexpr,
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
    kv_head = head // (shape.num_heads // shape.num_kv_heads)
    block_v: tl.constexpr = shape.block_v
    k_offsets, v_offsets = tl.arange(0, shape.block_k), tl.arange(0, block_v)
    token_of_row = (chunk_start + row)[:, None]
    q_mask = (row < num_queries)[:, None] & (k_offsets < shape.k_size)
    query = tl.load(q + token_of_row * q_token_stride + head * q_head_stride + k_offsets, mask=q_mask, other=0.0)
    running_max = tl.full([block_m], float("-inf"), tl.float32)
    running_sum = tl.zeros([block_m], tl.float32)
    acc = tl.zeros([block_m, block_v], tl.float32)
    begin = tl.maximum(seq_len - num_queries + first - window + 1, 0)
    end = tl.minimum(seq_len - num_queries + first + block_m, seq_len) if shape.causal else seq_len
    for start in range(begin, end, tile):
        token = start + tl.arange(0, tile)
        block = tl.load(block_table + token // shape.block_size, mask=token < end, other=0)
        slot = (block * shape.block_size + token % shape.block_size) * shape.num_kv_heads + kv_head
        k_mask = (token < end) & (k_offsets[:, None] < shape.k_size)
        k = tl.load(key_cache + slot * shape.k_size + k_offsets[:, None], mask=k_mask, other=0.0)  # [block_k, tile]
        distance = position[:, None] - token
        is_visible = (distance < window) & (token < end)
        if shape.causal:
            is_visible &= distance >= 0
        scores = attention_tile.scores_of(query, k, scale, shape)  # [block_m, tile]
        if bias is not None:
            scores += attention_tile.biases(bias, head, position[:, None], token, is_visible, shape)
        scores = tl.where(is_visible, scores, float("-inf"))
        v_mask = (token < end)[:, None] & (v_offsets < shape.v_size)
        v = tl.load(value_cache + slot[:, None] * shape.v_size + v_offsets, mask=v_mask, other=0.0)  # [tile, block_v]
        acc, running_max, running_sum = attention_tile.add(scores, v, acc, running_max, running_sum)

    if sinks is not None:
        running_sum += tl.exp2(tl.load(sinks + head).to(tl.float32) * attention_tile.LOG2_E - running_max)
    finished = (acc / running_sum[:, None]).to(output.dtype.element_ty)
    out_mask = (row < num_queries)[:, None] & (v_offsets < shape.v_size)
    tl.store(output + (token_of_row * shape.num_heads + head) * shape.v_size + v_offsets, finished, mask=out_mask)
