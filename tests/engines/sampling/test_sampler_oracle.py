"""Random rows, with scores that tie all the time, against a naive sampler."""

from collections.abc import Iterator
from dataclasses import dataclass
from unittest import mock

import pytest
import sampling_oracle as oracle
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_oracle import make_row, samplings
from sampling_steps import sample_batch

from tgis.engines.sampling import draws, logits_processors, sampler
from tgis.ipc.lookups import GrammarKind, GrammarSpec, Vocabulary
from tgis.ipc.request import LogprobOptions, SamplingParams
from tgis.structured_output.compiler import compile_grammar
from tgis.structured_output.matcher import GrammarMatcher, TokenTable

details = st.builds(
    LogprobOptions, st.booleans(), st.booleans(), st.booleans(), st.booleans(), st.sampled_from([0, 1, 2, 5, 99])
)


@dataclass
class Drawn:
    """A row; `allowed` is what its grammar allows."""

    sampling: SamplingParams
    details: LogprobOptions
    output: list[int]
    logits: list[float]
    context: list[int]
    allowed: set[int] | None


@st.composite
def batches(draw: st.DrawFn) -> list[Drawn]:
    vocabulary, width = draw(st.integers(8, 40)), draw(st.integers(1, 6))
    score = st.sampled_from([-float("inf"), -0.0, *map(float, range(-3, 4)), 0.0, 1.0, 1.0, 2.0])
    token = st.integers(0, vocabulary - 1)
    outputs = st.one_of(st.lists(st.integers(0, 2), max_size=8), st.lists(token, max_size=8))
    logits = st.lists(score, min_size=vocabulary, max_size=vocabulary)
    context = st.lists(token, min_size=width, max_size=width)
    allowed = st.one_of(st.none(), st.none(), st.sets(token, max_size=5))
    row = st.builds(Drawn, samplings, details, outputs, logits, context, allowed)
    return draw(st.lists(row, min_size=1, max_size=5))


def grammar_of(allowed: set[int], output: list[int], ends: list[int], vocab_size: int) -> GrammarMatcher:
    """A grammar that allows this output, with one of these tokens behind it or none."""
    texts = [f"\\x{{{0x4E00 + token:x}}}" for token in range(vocab_size)]
    tokens = [b"" if token in ends else chr(0x4E00 + token).encode() for token in range(vocab_size)]
    more = f"[{''.join(texts[token] for token in allowed)}]?" if allowed else ""
    pattern = "".join(texts[token] for token in output) + more
    spec = GrammarSpec(GrammarKind.REGEX, pattern)
    return compile_grammar(spec, TokenTable(Vocabulary(tokens), vocab_size, ends))


@pytest.fixture(params=["as it is", "lists too short"], autouse=True)
def _limits(request: pytest.FixtureRequest) -> Iterator[None]:
    """As if the vocabulary were hundreds of times as large: short lists, blocks of a few tokens and of one row."""
    if request.param == "as it is":
        yield
        return
    with (
        mock.patch.multiple(
            logits_processors, _LIST_STEP=4, _TIE_MARGIN=2, _MAX_LIST=9, LONG_LIST=12, _CPU_BLOCK_SCORES=50
        ),
        mock.patch.object(draws, "LONG_LIST", 12),
        mock.patch.object(sampler, "_TOP_P_CANDIDATES", 2),
    ):
        yield


@given(
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), batches(), st.lists(st.integers(0, 50), max_size=3)
)
@settings(max_examples=60)
def test_rows_match_the_naive_sampler(dtype: torch.dtype, batch: list[Drawn], eos: list[int]) -> None:
    vocab_size = len(batch[0].logits)
    seqs = [make_row(row.sampling, row.details, output=row.output) for row in batch]
    ends = sorted({token for token in eos if token < vocab_size})
    for row, seq in zip(batch, seqs, strict=True):
        if not ends or {*ends} & {*row.output}:
            row.allowed = None
        if row.allowed is not None:
            seq.grammar = grammar_of(row.allowed - {*ends}, row.output, ends, vocab_size)
            row.allowed |= {*ends}
    logits = torch.tensor([row.logits for row in batch], dtype=dtype)
    sampled = sample_batch(seqs, logits, [row.context for row in batch], eos)
    for i, row in enumerate(batch):
        generated, history = len(row.output), row.context + row.output
        expected = oracle.process(row.logits, row.sampling, generated, ends, history, row.output, row.allowed)
        bad = expected.scores.max() == -float("inf")
        assert (i in sampled.invalid) == bad
        if bad or expected.ambiguous:
            continue
        oracle.check_token(sampled.tokens[i], expected, row.sampling, generated)
        if row.details.generated_tokens and (row.details.logprobs or row.details.ranks or row.details.top_n_tokens):
            found = sampled.logprobs[i]
            assert found is not None
            oracle.check_logprobs(found, sampled.tokens[i], expected, row.details)
        else:
            assert not sampled.logprobs or sampled.logprobs[i] is None
