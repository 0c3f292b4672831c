# mypy: disallow-untyped-decorators=False
"""What attention kernels in Triton make of a tile of keys and values: softmax in one pass, to the base of 2."""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def attention_scores(query: tl.tensor, k: tl.tensor, scale: tl.tensor, softcap: tl.constexpr) -> tl.tensor:
    """Of queries [m, d] and keys [d, n], times log2(e)."""
    scores = tl.dot(query, k, input_precision="ieee") * scale
    if softcap is not None:
        scores = softcap * (1 - 2 / (1 + tl.exp(scores * (2 / softcap))))  # softcap * tanh(scores / softcap)
    return scores * LOG2_E


@triton.jit
def add_tile(
    scores: tl.tensor, v: tl.tensor, acc: tl.tensor, running_max: tl.tensor, running_sum: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The weighted sum of values, the highest score and the sum of weights with a tile [m, n] of scores and its values
    [n, e]; rows may have seen no key.
    """
    new_max = tl.maximum(running_max, tl.max(scores, 1))
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights, rescale = tl.exp2(scores - shift[:, None]), tl.exp2(running_max - shift)
    acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
    return acc, new_max, running_sum * rescale + tl.sum(weights, 1)
