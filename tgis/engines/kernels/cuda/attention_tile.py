# mypy: disallow-untyped-decorators=False
"""Shared parts of the Triton kernels for decode and prefill attention: their shape, and a step of online softmax."""

from typing import NamedTuple, Self

import triton
import triton.language as tl
from torch import Tensor

from tgis.engines.kernels.attention_inputs import AttentionParams

LOG2_E = tl.constexpr(1.4426950408889634)  # softmax is computed to the base of 2
NO_WINDOW = 2**31 - 1
MIN_DOT = 16  # smallest dimension of tl.dot


class AttentionShape(NamedTuple):
    """Sizes and parameters that a kernel is compiled for."""

    num_heads: int
    num_kv_heads: int
    k_size: int
    v_size: int
    block_k: int  # k_size and v_size, padded
    block_v: int
    block_size: int  # block size of the KV cache
    softcap: float | None
    bias_row: int  # stride of the bias
    bias_origin: int | None
    causal: bool

    @classmethod
    def of(cls, q: Tensor, key_cache: Tensor, value_cache: Tensor, params: AttentionParams) -> Self:
        """The shape for queries [T, H, D], and caches [blocks, block size, K, D] and [blocks, block size, K, E]."""
        (num_heads, k_size), (block_size, num_kv_heads, v_size) = q.shape[1:], value_cache.shape[1:]
        assert q.dtype == key_cache.dtype == value_cache.dtype
        assert q.stride(2) == 1
        assert key_cache.is_contiguous()
        assert value_cache.is_contiguous()
        block_k, block_v = (max(triton.next_power_of_2(size), MIN_DOT) for size in (k_size, v_size))
        sizes = num_heads, num_kv_heads, k_size, v_size, block_k, block_v, block_size
        bias_row = 0 if params.bias is None else params.bias.stride(0)
        return cls(*sizes, params.softcap, bias_row, params.bias_origin, params.causal)


@triton.jit
def scores_of(query: tl.tensor, k: tl.tensor, scale: tl.tensor, shape: tl.constexpr) -> tl.tensor:
    """The scores of queries [m, d] and keys [d, n], times log2(e)."""
    scores = tl.dot(query, k, input_precision="ieee") * scale
    if shape.softcap is not None:  # softcap * tanh(scores / softcap)
        scores = shape.softcap * (1 - 2 / (1 + tl.exp(scores * (2 / shape.softcap))))
    return scores * LOG2_E


@triton.jit
def biases(
    bias: tl.tensor, head: tl.tensor, position: tl.tensor, token: tl.tensor, mask: tl.tensor, shape: tl.constexpr
) -> tl.tensor:
    """The bias of heads for the keys of these tokens and queries at these positions, times log2(e)."""
    column = token if shape.bias_origin is None else token - position + shape.bias_origin
    return tl.load(bias + head * shape.bias_row + column, mask=mask, other=0.0) * LOG2_E


@triton.jit
def add(
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
