"""Attention as it is defined, in float64: what the bodies of paged attention must give."""

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
    keys, positions = torch.arange(len(k), device=q.device), before + torch.arange(len(q), device=q.device)[:, None]
    end = positions + 1 if params.causal else torch.full_like(positions, len(k))
    seen = (keys < end) & (keys >= end - (params.window or len(k)))  # [n, W]
    k, v = (
        states.double().masked_fill(~seen.any(0)[:, None, None], 0).repeat_interleave(group, 1) for states in (k, v)
    )
    scores = torch.einsum("nhd,whd->hnw", q.double(), k) * params.scale
    if params.softcap is not None:
        scores = torch.tanh(scores / params.softcap) * params.softcap
    if params.bias is not None:
        columns = keys if params.bias_origin is None else keys + params.bias_origin - positions
        scores = scores + params.bias.double()[:, columns.clamp(0, params.bias.shape[1] - 1).expand(seen.shape)]
    scores = scores.masked_fill(~seen, -torch.inf)
    if params.sinks is not None:
        scores = torch.cat([scores, params.sinks.double()[:, None, None].expand(-1, len(q), 1)], -1)
    return torch.einsum("hnw,whe->nhe", scores.softmax(-1)[..., : len(k)], v)
