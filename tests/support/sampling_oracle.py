"""The naive way to choose a token: one row at a time, in float64, step by step as the specification tells it.

`ambiguous` says that rounding may decide differently: the tests do without such rows.
"""

import functools
import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers import WatermarkLogitsProcessor

from tgis.batcher.sequence import Sequence as Row
from tgis.ipc.request import LogprobOptions, Request, SamplingParams, TokenLogprobs

Scores = NDArray[np.float64]
CLOSE = 1e-6
TOLERANCE = 1e-5  # of logprobs
_MASK = (1 << 64) - 1
_ids = itertools.count()

_SHARES = st.one_of(st.just(1.0), st.floats(0.01, 0.999))

samplings = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.0, 0.3, 1.0, 1.7]),
    top_k=st.one_of(st.sampled_from([0, 2**32 - 1]), st.integers(1, 12)),
    top_p=_SHARES,
    typical_p=_SHARES,
    seed=st.integers(0, 2**64 - 1),
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.5, 2.0]),
    length_penalty=st.one_of(st.none(), st.tuples(st.integers(0, 4), st.sampled_from([1.0, 1.5, 2.0]))),
    min_new_tokens=st.integers(0, 3),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.5, -1.0]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.25, -2.0]),
    logit_bias=st.one_of(
        st.none(), st.dictionaries(st.integers(0, 7), st.sampled_from([-100.0, -1.0, 0.5, 100.0]), max_size=3)
    ),
    watermark=st.sampled_from([False, False, True]),
    min_p=st.one_of(st.just(0.0), st.just(1.0), st.floats(0.001, 0.999)),
    stop_token_ids=st.lists(st.integers(0, 7), max_size=3).map(tuple),
    allowed_token_ids=st.one_of(st.none(), st.none(), st.lists(st.integers(0, 7), min_size=1, max_size=6).map(tuple)),
    bad_words=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple), max_size=4).map(tuple),
)


def make_row(
    sampling: SamplingParams,
    details: LogprobOptions | None = None,
    generated: int = 0,
    prompt: Collection[int] = (1, 2),
    output: list[int] | None = None,
) -> Row:
    """A row that has generated so many tokens."""
    request = Request(next(_ids), list(prompt), 10_000, False, sampling, details or LogprobOptions())
    row = Row(request, arrival_time=0.0)
    row.tokens += [0] * generated if output is None else output
    return row


def noise(seed: int, generated: int, token: int) -> float:
    """Exponentially distributed, of a token in a row's draw, in plain integers."""

    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        return z ^ (z >> 31)

    def splitmix64(start: int, index: int) -> int:
        return mix((start + (index + 1) * 0x9E3779B97F4A7C15) & _MASK)

    bits = splitmix64(splitmix64(mix(seed), generated), token)
    return -math.log1p(-((bits >> 12) + 0.5) / 2**52)


def softmax(scores: Scores) -> Scores:
    mass = np.exp(scores - scores.max())
    return np.asarray(mass / mass.sum())


@dataclass
class ProcessedScores:
    """The final scores of a row: -inf where a token is removed."""

    scores: Scores
    ambiguous: bool = False

    def logprobs(self) -> Scores:
        with np.errstate(divide="ignore"):
            mass = np.exp(self.scores - self.scores.max()).sum()
        return np.asarray(self.scores - self.scores.max() - math.log(mass))

    def rank(self, token: int) -> int:
        return 1 + sum(1 for score in self.scores if score > self.scores[token])

    def top(self, n: int, with_logprobs: bool) -> list[tuple[int, float]]:
        n = min(n, len(self.scores))
        if n == 0:
            return []
        threshold = max(sorted(self.scores, reverse=True)[n - 1], np.finfo(np.float32).min)
        ids = [token for token, score in enumerate(self.scores) if score >= threshold][: 4 * n]
        if not with_logprobs:
            return [(token, 0.0) for token in ids]
        logprobs = self.logprobs()
        return sorted(((token, float(logprobs[token])) for token in ids), key=lambda pair: (-pair[1], pair[0]))

    def draw(self, seed: int, generated: int) -> tuple[int, bool]:
        """The token that arrives first, and whether that is clear."""
        times = [
            noise(seed, generated, token) / p if p else math.inf
            for token, p in enumerate(softmax(self.scores).tolist())
        ]
        first, second = sorted(times)[:2]
        return times.index(first), second > first * (1 + CLOSE)


def process(
    logits: Collection[float],
    sampling: SamplingParams,
    generated: int,
    eos: Collection[int],
    context: Sequence[int],
    output: Sequence[int] = (),
    allowed: Collection[int] | None = None,
) -> ProcessedScores:
    """Penalties, then what a grammar and the request allow, then the filters of a sampled row; `context` is what a
    repetition penalty applies to.
    """
    result = ProcessedScores(np.array(logits, dtype=np.float64))
    if sampling.watermark:
        result.scores = _watermarked(result.scores, context)
    for token, bias in (sampling.logit_bias or {}).items():
        result.scores[token] += bias
    only_eos = allowed is not None and not set(allowed) - set(eos)
    _eos(result.scores, sampling, sampling.min_new_tokens if only_eos else generated, eos, generated)
    for token in set(context):
        score = result.scores[token]
        penalty = sampling.repetition_penalty
        result.scores[token] = score * penalty if score < 0 else score / penalty
    for token in output:
        result.scores[token] -= sampling.frequency_penalty
    for token in set(output):
        result.scores[token] -= sampling.presence_penalty
    for token in range(len(result.scores)):
        if _excluded(token, sampling, list(output), generated, only_eos) or (
            allowed is not None and token not in allowed
        ):
            result.scores[token] = -math.inf
    if sampling.temperature and result.scores.max() > -math.inf:
        result.scores /= sampling.temperature
        share = np.exp(result.scores - result.scores.max())
        result.ambiguous |= bool(sampling.min_p and (abs(share / sampling.min_p - 1) < CLOSE).any())
        result.scores[share < sampling.min_p] = -math.inf
        if sampling.top_k:
            kth = sorted(result.scores, reverse=True)[min(sampling.top_k, len(result.scores)) - 1]
            result.scores[result.scores < kth] = -math.inf
        _top_p(result, sampling.top_p)
        _typical_p(result, sampling.typical_p)
    return result


def _excluded(token: int, sampling: SamplingParams, output: list[int], generated: int, only_eos: bool) -> bool:
    """Whether the request itself excludes a token, whatever its score."""
    if sampling.allowed_token_ids is not None and token not in sampling.allowed_token_ids:
        return True
    bad = any([*output, token][-len(word) :] == list(word) for word in sampling.bad_words)
    early = generated < sampling.min_new_tokens and token in sampling.stop_token_ids
    return not only_eos and (bad or early)


@functools.cache
def _watermark_processor(vocab_size: int) -> WatermarkLogitsProcessor:
    return WatermarkLogitsProcessor(vocab_size, "cpu", greenlist_ratio=0.5, bias=2.0)


def _watermarked(scores: Scores, context: Sequence[int]) -> Scores:
    processed = _watermark_processor(len(scores))(torch.tensor([list(context)]), torch.tensor(scores)[None])
    return np.asarray(processed[0].numpy())


def _eos(scores: Scores, sampling: SamplingParams, length: int, eos: Collection[int], generated: int) -> None:
    """`length` is what the minimum is compared with."""
    for token in set(eos):
        if length < sampling.min_new_tokens:
            scores[token] = -math.inf
        elif sampling.length_penalty is not None:
            start, decay = sampling.length_penalty
            past = generated - start
            if past > 0 and np.isfinite(scores[token]):
                scores[token] += abs(scores[token]) * (decay**past - 1)


def _top_p(row: ProcessedScores, p: float) -> None:
    if p >= 1:
        return
    probabilities = softmax(row.scores)
    # from the least likely; of equal ones the highest id goes first, so that the best is the greedy choice
    order = sorted(range(len(row.scores)), key=lambda token: (row.scores[token], -token))
    upto = 0.0
    for token in order[:-1]:
        upto += probabilities[token]
        row.ambiguous |= abs(upto - (1 - p)) < CLOSE and probabilities[token] > 0
        if upto <= 1 - p:
            row.scores[token] = -math.inf


def _typical_p(row: ProcessedScores, p: float) -> None:
    if p >= 1:
        return
    logprobs = row.logprobs()
    alive = [token for token, logprob in enumerate(logprobs) if logprob > -math.inf]
    entropy = -sum(math.exp(logprobs[token]) * logprobs[token] for token in alive)
    away = {token: abs(-logprobs[token] - entropy) for token in alive}
    order = sorted(alive, key=lambda token: away[token])
    upto = 0.0
    for last in order:
        upto += math.exp(logprobs[last])
        row.ambiguous |= abs(upto - p) < CLOSE
        if upto >= p:
            break
    limit, score = away[last], row.scores[last]
    for token in alive:
        near = abs(away[token] - limit) < CLOSE
        row.ambiguous |= near and row.scores[token] != score
        if away[token] > limit:
            row.scores[token] = -math.inf


def check_token(token: int, expected: ProcessedScores, sampling: SamplingParams, generated: int) -> None:
    assert expected.scores[token] > -float("inf")
    if sampling.greedy:
        assert token == int(expected.scores.argmax())
        return
    drawn, certain = expected.draw(sampling.seed, generated)
    assert token == drawn or not certain


def check_logprobs(found: TokenLogprobs, token: int, expected: ProcessedScores, details: LogprobOptions) -> None:
    assert found.logprob == pytest.approx(
        expected.logprobs()[token] if details.logprobs else 0.0, abs=TOLERANCE, rel=CLOSE
    )
    assert found.rank == (expected.rank(token) if details.ranks else 0)
    top = expected.top(details.top_n_tokens, details.logprobs)
    assert [token for token, _ in found.top_logprobs] == [token for token, _ in top]
    assert [each for _, each in found.top_logprobs] == pytest.approx(
        [each for _, each in top], abs=TOLERANCE, rel=CLOSE
    )
