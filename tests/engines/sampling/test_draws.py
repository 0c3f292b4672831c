"""Draws: which token a seed chooses, how often, and how little rounding matters."""

import math

import numpy as np
import pytest
import sampling_oracle as oracle
import torch
from cpu_kernels import CPU_ISA, kernels_of
from msgspec.structs import replace
from numpy.typing import NDArray
from sampling_oracle import make_row
from sampling_steps import sample_batch

from tgis.engines.sampling import draws
from tgis.engines.sampling.draws import Draw, SamplingOps, exponential_noise, noise_keys, select_ops
from tgis.engines.sampling.logits_processors import Scores
from tgis.ipc.request import SamplingParams

CPU = torch.device("cpu")
GOLDEN = 0x9E3779B97F4A7C15
SEEDS = [0, 1, 2**32, 2**63, 2**64 - 1]


@pytest.fixture(params=["PyTorch", "C"])
def draw(request: pytest.FixtureRequest) -> Draw:
    return draws.draw if request.param == "PyTorch" else select_ops(CPU, kernels_of(CPU_ISA)).draw


def normal(*shape: int, seed: int = 0, spread: float = 1.5) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * spread


def scores_of(values: torch.Tensor, temperature: float = 1.0) -> Scores:
    temperatures = torch.full((len(values), 1), temperature, dtype=torch.float64)
    return Scores(values, values.amax(-1, keepdim=True).float(), temperatures)


def keys_of(count: int) -> torch.Tensor:
    seeds = np.arange(count, dtype=np.uint64)
    return torch.from_numpy(noise_keys(seeds, np.zeros(count, np.int64)))[:, None]


def sample(sampling: list[SamplingParams], generated: list[int], logits: torch.Tensor, draw: Draw) -> list[int]:
    rows = [make_row(own, generated=count) for own, count in zip(sampling, generated, strict=True)]
    return sample_batch(rows, logits, [[0]] * len(rows), ops=SamplingOps(draw=draw)).tokens


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("vocabulary", [7, 256, 700])
@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 5}, {"top_p": 0.8}, {"top_p": 0.9, "typical_p": 0.9}, {"min_p": 0.1}]
)
def test_the_least_noise_over_p_is_drawn(seed: int, vocabulary: int, filters: dict[str, float], draw: Draw) -> None:
    logits = normal(40, vocabulary, seed=seed % 1000)
    sampling = SamplingParams(temperature=0.9, seed=seed, **filters)  # type: ignore[arg-type]
    sampled = sample([sampling] * 40, list(range(40)), logits, draw)
    for step, found in enumerate(sampled):
        expected = oracle.process(logits[step].tolist(), sampling, step, [], [])
        token, certain = expected.draw(seed, step)
        assert found == token
        assert certain


@pytest.mark.parametrize("vocabulary", [20, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=1.3),
        SamplingParams(temperature=1.0, top_k=9),
        SamplingParams(temperature=0.7, top_p=0.8),
        SamplingParams(temperature=1.0, typical_p=0.7),
        SamplingParams(temperature=0.9, top_k=12, top_p=0.95, typical_p=0.9),
        SamplingParams(temperature=1.1, min_p=0.05),
        SamplingParams(temperature=1.1, min_p=0.03, top_p=0.9),
    ],
)
@pytest.mark.parametrize("vary", ["seed", "generated"])
def test_draws_are_distributed_as_the_probabilities(
    vocabulary: int, sampling: SamplingParams, vary: str, draw: Draw
) -> None:
    """Chi-square over the likely tokens, against about its 99.99 % point; the seeds are fixed."""
    count, logits = 4000, normal(1, vocabulary, spread=2.0)
    seeds = [replace(sampling, seed=i if vary == "seed" else 0) for i in range(count)]
    tokens = sample(seeds, [i if vary == "generated" else 3 for i in range(count)], logits.expand(count, -1), draw)
    expected = oracle.softmax(oracle.process(logits[0].tolist(), sampling, 0, [], []).scores) * count
    assert set(tokens) <= set(np.flatnonzero(expected))
    likely = np.flatnonzero(expected >= 8)
    found = np.bincount(tokens, minlength=vocabulary)
    cells = np.append(expected[likely], count - expected[likely].sum())
    seen = np.append(found[likely], count - found[likely].sum())
    statistic = ((seen - cells)[cells > 1] ** 2 / cells[cells > 1]).sum()
    freedom = (cells > 1).sum() - 1
    assert statistic < freedom + 4 * math.sqrt(2 * freedom) + 8


@pytest.mark.parametrize("p", [1e-4, 1e-8, 1e-12])
def test_unlikely_tokens_get_their_share(p: float, draw: Draw) -> None:
    """Token 1 of probability p can win where its uniform number u is small: of u < 4 p it wins with probability
    P(u < p E) = (1 - exp(-4)) / 4, E being the noise of the other token. Keys that give such u are found by inverting
    the hash.
    """
    count, generator = 20_000, np.random.default_rng(1)
    bits = generator.integers(0, int(4 * p * 2**64), count, dtype=np.uint64)
    keys = torch.from_numpy((_unmix(bits) - np.uint64(2 * GOLDEN % 2**64)).view(np.int64))[:, None]
    wins = draw(scores_of(torch.tensor([[0.0, math.log(p)]]).expand(count, -1)), keys).double().mean().item()
    assert wins == pytest.approx((1 - math.exp(-4)) / 4, abs=4 * 0.43 / math.sqrt(count))


def _unmix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The inverse of the finalizer of splitmix64."""

    def unshift(z: NDArray[np.uint64], count: int) -> NDArray[np.uint64]:
        x = z
        for _ in range(64 // count):
            x = z ^ (x >> np.uint64(count))
        return x

    z = unshift(z, 31) * np.uint64(pow(0x94D049BB133111EB, -1, 2**64))
    z = unshift(z, 27) * np.uint64(pow(0xBF58476D1CE4E5B9, -1, 2**64))
    return unshift(z, 30)


def test_rounding_changes_a_draw_at_near_ties_only(draw: Draw) -> None:
    """Two arrivals change places only if the scores' errors bridge what is between them."""
    count = 500
    logits, keys = normal(count, 4000, spread=1.0), keys_of(count)
    errors = normal(count, 4000, seed=1, spread=1e-3)
    before, after = (draw(scores_of(values), keys) for values in (logits, logits + errors))
    arrivals = logits.double() - exponential_noise(keys, torch.arange(4000)).log()
    first, second = arrivals.topk(2).values.split(1, -1)
    clear = first - second > 2 * errors.abs().max()
    assert clear.sum() > 0.97 * count
    assert torch.equal(before[clear], after[clear])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("temperature", [1e-30, 0.1, 1.0, 1e4])
@pytest.mark.parametrize("size", [1, 15, 16, 17, 1000])
def test_a_removed_token_is_never_drawn(dtype: torch.dtype, temperature: float, size: int, draw: Draw) -> None:
    for place in {0, size // 2, size - 1}:
        values = torch.full((30, size), -torch.inf, dtype=dtype)
        values[:, place] = -60.0
        assert draw(scores_of(values, temperature), keys_of(30)).tolist() == [[place]] * 30
    values = normal(200, size).to(dtype).masked_fill(normal(200, size, seed=1) < 0, -torch.inf)
    values[:, size // 2] = 1.0
    assert values.gather(1, draw(scores_of(values, temperature), keys_of(200))).isfinite().all()
