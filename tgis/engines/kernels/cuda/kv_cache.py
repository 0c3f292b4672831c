# mypy: disallow-untyped-decorators=False
"""Writes the new keys and values of a step to their slots of the paged KV cache, in one Triton kernel."""

import triton
import triton.language as tl
from torch import Tensor


def write_kv_cache(k: Tensor, v: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write keys [T, K, D] and values [T, K, E] to `slot_mapping` [T] of `key_cache` [blocks, block size, K, D] and
    `value_cache` [blocks, block size, K, E], which are contiguous. All tensors are on the current device.
    """
    (num_tokens, num_heads, k_size), v_size = k.shape, v.shape[2]
    assert k.dtype == v.dtype == key_cache.dtype == value_cache.dtype
    assert slot_mapping.stride(0) == 1
    assert key_cache.is_contiguous()
    assert value_cache.is_contiguous()
    k, v = (states if states.stride(2) == 1 else states.contiguous() for states in (k, v))
    _write_token[num_tokens,](
        *(k, v, key_cache, value_cache, slot_mapping, k.stride(0), k.stride(1), v.stride(0), v.stride(1)),
        *(num_heads, k_size, v_size),
    )


@triton.jit
def _write_token(
    k: tl.tensor,
    v: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    slot_mapping: tl.tensor,
    k_token_stride: tl.tensor,
    k_head_stride: tl.tensor,
    v_token_stride: tl.tensor,
    v_head_stride: tl.tensor,
    num_heads: tl.constexpr,
    k_size: tl.constexpr,
    v_size: tl.constexpr,
) -> None:
    """Write all heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    first = tl.load(slot_mapping + token).to(tl.int64) * num_heads  # row of heads in the caches
    head = tl.arange(0, triton.next_power_of_2(num_heads))[:, None]
    k_offsets, v_offsets = tl.arange(0, triton.next_power_of_2(k_size)), tl.arange(0, triton.next_power_of_2(v_size))
    k_mask, v_mask = (head < num_heads) & (k_offsets < k_size), (head < num_heads) & (v_offsets < v_size)
    key = tl.load(k + token * k_token_stride + head * k_head_stride + k_offsets, mask=k_mask)
    value = tl.load(v + token * v_token_stride + head * v_head_stride + v_offsets, mask=v_mask)
    tl.store(key_cache + (first + head) * k_size + k_offsets, key, mask=k_mask)
    tl.store(value_cache + (first + head) * v_size + v_offsets, value, mask=v_mask)
