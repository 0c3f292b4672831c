"""The operators of recurrent layers over a flat batch, in plain PyTorch. Outputs of C kernels must be the same; their
states may have another layout within a slot.

`slots` is int64 [tokens, 3]: the slot with the state of a sequence before its first token (-1: zeros; ignored at later
tokens), the slot that has it after the last token, and a slot that gets a copy after this token (-1: none). Successive
tokens with the same slot are a sequence, in order. A slot that is written for one sequence is not read for another.
"""

from collections.abc import Callable
from itertools import groupby

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus
from transformers.activations import ACT2FN

from tgis.engines.kernels.cpu.recurrent import StateSpace

Step = Callable[[Tensor, int], tuple[Tensor, Tensor]]  # (state, token) -> (next state, output)


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, tails: Tensor, slots: Tensor
) -> Tensor:
    """A convolution of each channel over the last tokens: x [T, C], weight [C, K], tails [slots, K - 1, C]."""

    def step(tail: Tensor, token: int) -> tuple[Tensor, Tensor]:
        window = torch.cat([tail, x[token : token + 1]])
        return window[1:], (window.float() * weight.T.float()).sum(0)

    y = _scan(step, tails, slots)
    y = y if bias is None else y + bias.float()
    return (ACT2FN[activation](y) if activation else y).to(x.dtype)


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor, slots: Tensor, normalize: bool
) -> Tensor:
    """Linear attention with a delta rule: q, k [T, HK, DK], v [T, HV, DV], g, beta [T, HV], states [slots, HV, DK, DV].

    Keys and queries are normalized if asked for. A state decays by e^g before the token's key and value are added.
    """
    heads, scale = v.shape[1] // k.shape[1], k.shape[2] ** -0.5
    q, k = (x.float().repeat_interleave(heads, 1) for x in (q, k))
    if normalize:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    decay, values, factors = g.float().exp(), v.float(), beta.float()

    def step(state: Tensor, token: int) -> tuple[Tensor, Tensor]:
        state = state * decay[token, :, None, None]
        missing = values[token] - (state * k[token, :, :, None]).sum(1)
        state = state + k[token, :, :, None] * (missing * factors[token, :, None])[:, None]
        return state, (state * q[token, :, :, None]).sum(1) * scale

    return _scan(step, states, slots).to(v.dtype)


def selective_scan(inputs: StateSpace, states: Tensor, slots: Tensor) -> Tensor:
    """A state space, states [slots, H, P, N]."""
    x, dt, a, b, c, d, z, dt_bias, dt_limit = inputs
    b, c = (each.float().repeat_interleave(x.shape[1] // b.shape[1], 1)[:, :, None] for each in (b, c))
    dt = softplus(dt.float() if dt_bias is None else dt.float() + dt_bias.float()).clamp(*dt_limit)
    added = dt * x.float()

    def step(state: Tensor, token: int) -> tuple[Tensor, Tensor]:
        state = state * (dt[token, ..., None] * a).exp() + added[token, ..., None] * b[token]
        return state, (state * c[token]).sum(-1)

    y = _scan(step, states, slots)
    y = y if d is None else y + x.float() * d.float()
    return (y if z is None else y * silu(z.float())).to(x.dtype)


def _scan(step: Step, states: Tensor, slots: Tensor) -> Tensor:
    """The outputs of all tokens, each computed from the state before it."""
    outputs = []
    rows = slots.tolist()
    for slot, tokens in groupby(range(len(rows)), key=lambda token: rows[token][1]):
        state: Tensor | None = None
        for token in tokens:
            source, _, save = rows[token]
            if state is None:
                state = torch.zeros_like(states[0]) if source < 0 else states[source]
            state, output = step(state, token)
            outputs.append(output)
            if save >= 0:
                states[save] = state
        states[slot] = state
    return torch.stack(outputs)
