"""The next token of each row: directed cases."""

import itertools
import math
from collections.abc import Collection

import pytest
import sampling_oracle as oracle
import torch
from cpu_kernels import CPU_ISA, kernels_of, num_threads
from msgspec.structs import replace
from sampling_oracle import make_row
from sampling_steps import Sampled, sample_batch

from tgis.batcher.sequence import Sequence
from tgis.engines.sampling import logits_processors
from tgis.engines.sampling.draws import select_ops
from tgis.engines.sampling.logprobs import prompt_logprobs
from tgis.ipc.request import LogprobOptions, SamplingParams, TokenLogprobs

CPU = torch.device("cpu")
EOS = [3, 7]
LOGPROBS = LogprobOptions(generated_tokens=True, logprobs=True)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
INFINITY = math.inf


def choose(
    rows: list[Sequence], logits: torch.Tensor, context: Collection[int] = (0,), eos: Collection[int] = ()
) -> Sampled:
    """One step, with the same history for all rows."""
    return sample_batch(rows, logits, [[*context]] * len(rows), eos)


def logprobs_of(sampled: Sampled, row: int = 0) -> TokenLogprobs:
    found = sampled.logprobs[row]
    assert found is not None
    return found


def candidates(
    sampling: SamplingParams, logits: list[float] | torch.Tensor, context: Collection[int] = (0,)
) -> dict[int, float]:
    """The logprob of each token that a single row may sample."""
    scores = torch.as_tensor(logits, dtype=torch.float32)[None]
    row = make_row(sampling, replace(LOGPROBS, top_n_tokens=scores.shape[1]))
    return dict(logprobs_of(choose([row], scores, context)).top_logprobs)


def normal(*shape: int, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * spread


def test_a_sure_token_has_logprob_zero() -> None:
    """It has no sign, which JSON would show."""
    sampled = choose([make_row(SamplingParams(), LOGPROBS)], torch.tensor([[-INFINITY, 1.0, -INFINITY]]))
    assert str(logprobs_of(sampled).logprob) == "0.0"


@pytest.mark.parametrize(
    ("penalty", "logits", "best"),
    [
        (1e-38, [5.0, 1.0, -2.0, 0.0], [0]),  # 5e38 is beyond any float32
        (1e-45, [5.0, 0.0, -INFINITY, -3.0], [0]),
        (3e38, [-5.0, 0.0, -INFINITY, -3.0], [1]),
        (3e38, [-5.0, -INFINITY, -2.0, -3.0], [0, 2, 3]),
    ],
)
def test_extreme_repetition_penalties_stay_finite(penalty: float, logits: list[float], best: list[int]) -> None:
    """All tokens are in the history; those that are excluded stay so."""
    found = candidates(SamplingParams(temperature=1.0, repetition_penalty=penalty), logits, context=range(4))
    assert [token for token, logprob in found.items() if logprob > -50] == best
    assert found[best[0]] == pytest.approx(-math.log(len(best)))
    greedy = SamplingParams(repetition_penalty=penalty)
    assert choose([make_row(greedy)], torch.tensor([logits]), range(4)).tokens == best[:1]


@pytest.mark.parametrize(
    "sampling", [SamplingParams(), SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_k=3)]
)
def test_an_overflowing_length_penalty_samples_eos(sampling: SamplingParams) -> None:
    sampling = replace(sampling, length_penalty=(1, 10.0))
    logits = normal(1, 20).abs() + 1
    logits[0, 7] = -INFINITY
    sampled = choose([make_row(sampling, LOGPROBS, generated=5000)], logits, eos=EOS)
    assert (sampled.tokens, sampled.invalid, logprobs_of(sampled).logprob) == ([3], [], 0.0)


def test_rows_that_ask_for_one_thing_only() -> None:
    row = make_row(SamplingParams(), LogprobOptions(generated_tokens=True, ranks=True))
    assert logprobs_of(choose([row], torch.tensor([[1.0, 2.0]]))).rank == 1
    row = make_row(SamplingParams(bad_words=((2, 1),)), output=[2])
    assert choose([row], torch.tensor([[0.0, 3.0, 1.0, 2.0]])).tokens == [3]


def test_each_row_has_its_minimum_length() -> None:
    rows = [make_row(SamplingParams(min_new_tokens=least), generated=4) for least in (2, 9)]
    logits = torch.tensor([[0.0, 3.0, 0.0, 5.0, 0.0, 0.0, 0.0, 4.0]] * 2)
    assert choose(rows, logits, eos=EOS).tokens == [3, 1]


RANKS = replace(LOGPROBS, ranks=True)
ROWS = [
    (SamplingParams(), LogprobOptions()),
    (SamplingParams(), replace(RANKS, top_n_tokens=5)),
    (SamplingParams(repetition_penalty=1.4, min_new_tokens=4), LogprobOptions()),
    (SamplingParams(length_penalty=(2, 1.2)), LOGPROBS),
    (SamplingParams(frequency_penalty=0.7, presence_penalty=-0.2), LOGPROBS),
    (SamplingParams(temperature=0.9, logit_bias={3: 2.5, 8: -100.0}, watermark=True), LOGPROBS),
    (SamplingParams(temperature=0.8), LogprobOptions(generated_tokens=True, ranks=True)),
    (SamplingParams(temperature=1.2), replace(LOGPROBS, top_n_tokens=4)),
    (SamplingParams(temperature=0.8, top_k=50, top_p=0.9, typical_p=0.9), LogprobOptions()),
    (SamplingParams(temperature=0.8, top_k=700), replace(RANKS, top_n_tokens=2)),
    (SamplingParams(temperature=1.0, top_p=0.95), LOGPROBS),
    (SamplingParams(temperature=1.0, typical_p=0.5, repetition_penalty=2.0), replace(LOGPROBS, top_n_tokens=9)),
    (SamplingParams(temperature=1.1, top_p=0.99, typical_p=0.9), RANKS),
]


@pytest.mark.parametrize("poison", ["one nan", "infinite", "nothing left", "only the end"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_invalid_row_fails_alone(poison: str, dtype: torch.dtype) -> None:
    """Whatever it asks for: its neighbours, in the same group and in others, get the same as without it."""
    rows = [make_row(*each) for each in ROWS] + [make_row(*each) for each in ROWS]
    if poison == "only the end":
        rows[: len(ROWS)] = [make_row(SamplingParams(s.temperature, s.top_k, min_new_tokens=9), d) for s, d in ROWS]
    logits = normal(len(rows), 1500).to(dtype)
    expected = choose(rows, logits, eos=EOS)
    broken = logits[: len(ROWS)]
    if poison == "one nan":
        broken[:, 44] = math.nan
    elif poison == "infinite":
        broken[:, 44] = INFINITY
    else:
        broken[:] = -INFINITY
        broken[:, EOS] = 1.0 if poison == "only the end" else -INFINITY
    sampled = choose(rows, logits, eos=EOS)
    assert sampled.invalid == list(range(len(ROWS)))
    assert sampled.tokens[len(ROWS) :] == expected.tokens[len(ROWS) :]
    assert sampled.logprobs[len(ROWS) :] == expected.logprobs[len(ROWS) :]


@pytest.mark.parametrize("isa", ["none", CPU_ISA])
def test_neighbours_change_no_bit(isa: str) -> None:
    """Neither what they ask for nor how many they are, in a vocabulary so large that threads share its sums."""
    ops, rows = select_ops(CPU, kernels_of(isa)), [make_row(*each) for each in ROWS]
    logits, history = normal(len(rows), 40_000), [[0, 5]]
    with num_threads(2):
        together = sample_batch(rows, logits, history * len(rows), EOS, ops)
        for at, row in enumerate(rows):
            tokens, logprobs, _ = sample_batch([row], logits[at : at + 1], history, EOS, ops)
            assert (tokens, logprobs or [None]) == ([together.tokens[at]], [together.logprobs[at]])


@pytest.mark.parametrize("temperature", [1e-60, 1e-4])
@pytest.mark.parametrize("filters", [{}, {"top_k": 5}, {"top_p": 0.5}, {"typical_p": 0.5}])
def test_sampling_at_the_lowest_temperatures_is_greedy(temperature: float, filters: dict[str, float]) -> None:
    logits = normal(20, 400)
    sampling = SamplingParams(temperature=temperature, seed=4, **filters)  # type: ignore[arg-type]
    sampled = choose([make_row(sampling, LOGPROBS) for _ in range(20)], logits)
    assert sampled.tokens == logits.argmax(-1).tolist()
    assert all(logprobs_of(sampled, i).logprob == pytest.approx(0.0, abs=1e-6) for i in range(20))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 30), (17, 30), (5, 1200)])
def test_prompt_logprobs(dtype: torch.dtype, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logits_processors, "_CPU_BLOCK_SCORES", 2500)
    logits = normal(*shape, spread=1.5).to(dtype)
    tokens = torch.randint(0, shape[1], (shape[0],)).tolist()
    for logprobs, ranks, n in itertools.product((True, False), (True, False), (0, 1, 4, shape[1] + 1)):
        details = LogprobOptions(False, True, logprobs, ranks, n)
        for row, token, found in zip(logits.double(), tokens, prompt_logprobs(logits, tokens, details), strict=True):
            oracle.check_logprobs(found, token, oracle.ProcessedScores(row.numpy()), details)


@pytest.mark.parametrize("n", [1, 5, 20])
@pytest.mark.parametrize("num_levels", [1, 4, 60, 10_000])
@pytest.mark.parametrize("temperature", [0.0, 3.0])
def test_exactly_n_candidates(n: int, num_levels: int, temperature: float) -> None:
    """However many tie with the last one; then the chosen token is among them."""
    values = (normal(8, 300, seed=n) * num_levels).round() / num_levels if num_levels > 1 else torch.ones(8, 300)
    logits = values if num_levels > 60 else values.bfloat16()
    options = LogprobOptions(generated_tokens=True, logprobs=True, top_n_tokens=n, exact_top_n=True)
    rows = [make_row(SamplingParams(temperature=temperature, seed=seed), options) for seed in range(8)]
    sampled = choose(rows, logits.clone())
    for row, scores in enumerate(logits.double().numpy()):
        token, found = sampled.tokens[row], logprobs_of(sampled, row).top_logprobs
        best = sorted(scores, reverse=True)[:n]
        assert [scores[each] for each, _ in found] == best
        assert len({each for each, _ in found}) == n
        assert (token in dict(found)) == (scores[token] >= best[-1])
        assert dict(found).get(token, logprobs_of(sampled, row).logprob) == logprobs_of(sampled, row).logprob


def test_prompt_logprobs_of_an_invalid_position() -> None:
    logits = normal(3, 300)
    logits[1] = math.nan
    details = LogprobOptions(input_tokens=True, logprobs=True, ranks=True, top_n_tokens=2)
    found = prompt_logprobs(logits, [1, 2, 3], details)
    assert math.isnan(found[1].logprob)
    assert found[::2] == prompt_logprobs(logits[::2], [1, 3], details)
