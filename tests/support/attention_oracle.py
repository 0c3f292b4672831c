"""Attention as it is defined, in float64 and token by token: what the bodies of paged attention must give."""

from typing import Any

import torch
from torch import Tensor

from tgis.engines.kernels.attention_inputs import BIAS_PADDING, AttentionParams


def random_bias(heads: int, length: int, *, by_distance: bool, causal: bool = True) -> dict[str, Any]:
    """Arguments of AttentionParams, for sequences of up to `length` tokens; what must not count is large."""
    columns = 2 * length - 1 if by_distance and not causal else length
    table = torch.randn(heads, columns + BIAS_PADDING, generator=torch.Generator().manual_seed(2)) * 2
    table[:, columns:] = 1e4
    return {"bias": table, "bias_origin": length - 1 if by_distance else None}


def reference_attention(q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
    """Queries [n, H, D] of the last n tokens of a row, over keys [W, K, D] and values [W, K, E] of all: [n, H, E]."""
    group, before = q.shape[1] // k.shape[1], k.shape[0] - q.shape[0]
    q, k, v = q.double(), k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    output = q.new_zeros(*q.shape[:2], v.shape[-1])
    for n, query in enumerate(q):
        position = before + n
        end = position + 1 if params.causal else len(k)
        start = 0 if params.window is None else max(0, end - params.window)
        scores = torch.einsum("hd,whd->hw", query, k[start:end]) * params.scale
        if params.softcap is not None:
            scores = torch.tanh(scores / params.softcap) * params.softcap
        if params.bias is not None:
            shift = 0 if params.bias_origin is None else params.bias_origin - position
            scores = scores + params.bias[:, start + shift : end + shift].double()
        if params.sinks is not None:
            scores = torch.cat([scores, params.sinks.double()[:, None]], 1)
        weights = scores.softmax(1)[:, : end - start]
        output[n] = torch.einsum("hw,whe->he", weights, v[start:end])
    return output
