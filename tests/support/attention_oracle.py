"""Attention as it is defined, in float64 and token by token: what the bodies of paged attention must give."""

import torch
from torch import Tensor

from tgis.engines.kernels.attention_inputs import AttentionParams


def reference_attention(q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
    """Queries [n, H, D] of the last n tokens of a row, over keys [W, K, D] and values [W, K, E] of all: [n, H, E]."""
    group, before = q.shape[1] // k.shape[1], k.shape[0] - q.shape[0]
    q, k, v = q.double(), k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    output = q.new_zeros(*q.shape[:2], v.shape[-1])
    for n, query in enumerate(q):
        end = before + n + 1
        start = 0 if params.window is None else max(0, end - params.window)
        scores = torch.einsum("hd,whd->hw", query, k[start:end]) * params.scale
        if params.softcap is not None:
            scores = torch.tanh(scores / params.softcap) * params.softcap
        if params.sinks is not None:
            scores = torch.cat([scores, params.sinks.double()[:, None]], 1)
        weights = scores.softmax(1)[:, : end - start]
        output[n] = torch.einsum("hw,whe->he", weights, v[start:end])
    return output
