"""Draws: which token a seed chooses. kernels/test_cpu_sampling.py compares the C kernel with them."""

import numpy as np
import pytest
import sampling_oracle as oracle
import torch
from sampling_oracle import make_row
from sampling_steps import sample_batch

from tgis.engines.sampling import draws
from tgis.engines.sampling.draws import noise_keys
from tgis.engines.sampling.logits_processors import Scores
from tgis.ipc.request import SamplingParams


def normal(*shape: int, seed: int = 0, spread: float = 1.5) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * spread


def scores_of(values: torch.Tensor, temperature: float = 1.0) -> Scores:
    temperatures = torch.full((len(values), 1), temperature, dtype=torch.float64)
    return Scores(values, values.amax(-1, keepdim=True).float(), temperatures)


def keys_of(count: int) -> torch.Tensor:
    seeds = np.arange(count, dtype=np.uint64)
    return torch.from_numpy(noise_keys(seeds, np.zeros(count, np.int64)))[:, None]


def sample(sampling: list[SamplingParams], generated: list[int], logits: torch.Tensor) -> list[int]:
    rows = [make_row(own, generated=count) for own, count in zip(sampling, generated, strict=True)]
    return sample_batch(rows, logits, [[0]] * len(rows)).tokens


@pytest.mark.parametrize(
    ("seed", "vocabulary", "filters"),
    [
        (0, 7, {}),
        (2**64 - 1, 700, {}),
        (1, 256, {"top_k": 5}),
        (2**32, 700, {"top_p": 0.8}),
        (2**63, 256, {"top_p": 0.9, "typical_p": 0.9}),
        (5, 7, {"min_p": 0.1}),
    ],
)
def test_the_least_noise_over_p_is_drawn(seed: int, vocabulary: int, filters: dict[str, float]) -> None:
    logits = normal(40, vocabulary, seed=seed % 1000)
    sampling = SamplingParams(temperature=0.9, seed=seed, **filters)  # type: ignore[arg-type]
    sampled = sample([sampling] * 40, list(range(40)), logits)
    for step, found in enumerate(sampled):
        expected = oracle.process(logits[step].tolist(), sampling, step, [], [])
        token, certain = expected.draw(seed, step)
        assert found == token
        assert certain


@pytest.mark.parametrize(
    ("dtype", "temperature"),
    [(torch.float32, 1e-30), (torch.float32, 1e4), (torch.bfloat16, 0.1), (torch.float16, 1.0), (torch.float64, 1.0)],
)
@pytest.mark.parametrize("size", [1, 15, 16, 17, 1000])
def test_a_removed_token_is_never_drawn(dtype: torch.dtype, temperature: float, size: int) -> None:
    for place in {0, size // 2, size - 1}:
        values = torch.full((30, size), -torch.inf, dtype=dtype)
        values[:, place] = -60.0
        assert draws.draw(scores_of(values, temperature), keys_of(30)).tolist() == [[place]] * 30
    values = normal(200, size).to(dtype).masked_fill(normal(200, size, seed=1) < 0, -torch.inf)
    values[:, size // 2] = 1.0
    assert values.gather(1, draws.draw(scores_of(values, temperature), keys_of(200))).isfinite().all()
