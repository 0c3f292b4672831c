"""Test cases of draws from whole vocabularies: the CPU kernel, and the GPU kernel on a GPU or interpreted."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tgis.engines.sampling import draws
from tgis.engines.sampling.draws import exponential_noise
from tgis.engines.sampling.logits_processors import Scores


@dataclass(frozen=True)
class Case:
    rows: int
    vocab_size: int
    temperature: float = 1.0
    spread: float = 3.0
    dtype: torch.dtype = torch.float32
    removed: float = 0.0  # share of tokens


CASES = {
    "one token": Case(3, 1),
    "less than a vector": Case(50, 3),
    "a vector": Case(50, 16),
    "a token more": Case(50, 17),
    "a large vocabulary": Case(9, 50_257),
    "flat": Case(60, 5000, temperature=100.0),
    "equal scores": Case(60, 5000, spread=0.0),
    "steep": Case(200, 1000, temperature=0.1),
    "steeper than single precision": Case(50, 1000, temperature=1e-3),
    "the lowest temperature": Case(50, 1000, temperature=1e-30),
    "far below the best": Case(50, 1000, spread=200.0),
    "grammar": Case(50, 5000, removed=0.999),
    "bfloat16": Case(60, 5000, dtype=torch.bfloat16),
}


def inputs(case: Case) -> tuple[Scores, Tensor]:
    generator = torch.Generator().manual_seed(case.vocab_size)
    shape = case.rows, case.vocab_size
    values = torch.randn(shape, generator=generator) * case.spread
    removed = torch.rand(shape, generator=generator) < case.removed
    removed[:, case.vocab_size // 3] = False
    values = values.masked_fill(removed, -torch.inf).to(case.dtype)
    temperature = torch.full((case.rows, 1), case.temperature, dtype=torch.float64)
    keys = torch.randint(-(2**63), 2**63 - 1, (case.rows, 1), generator=generator)
    return Scores(values, values.amax(-1, keepdim=True).float(), temperature), keys


def changed(case: Case, draw: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor], device: str) -> float:
    """The share of rows with another token than in plain PyTorch; infinite if one is not of a near tie."""
    scores, keys = inputs(case)
    on_device = (each.to(device) for each in (scores.values, scores.max_score, scores.temperature, keys))
    found = draw(*on_device).cpu()
    noisy = scores.scaled_logits(torch.float64) - exponential_noise(keys, torch.arange(case.vocab_size)).log()
    below = noisy.amax(-1, keepdim=True) - noisy.gather(1, found)
    other = found != draws.draw(scores, keys)
    return math.inf if (below > 1e-5).any() else other.double().mean().item()
