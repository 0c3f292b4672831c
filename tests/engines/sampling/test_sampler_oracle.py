"""Random rows, with scores that tie all the time, against a naive sampler."""

from collections.abc import Iterator
from unittest import mock

import pytest
import sampling_oracle as oracle
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_oracle import make_row, samplings
from sampling_steps import sample_batch

from tgis.engines.sampling import logits_processors, sampler
from tgis.ipc.lookups import GrammarKind, GrammarSpec, Vocabulary
from tgis.ipc.request import LogprobOptions, SamplingParams
from tgis.structured_output.compiler import compile_grammar
from tgis.structured_output.matcher import GrammarMatcher, TokenTable

details = st.builds(
    LogprobOptions, st.booleans(), st.booleans(), st.booleans(), st.booleans(), st.sampled_from([0, 1, 2, 5, 99])
)


# parameters, details, outputs so far, logits, contexts, and what grammars allow
Batch = tuple[
    list[SamplingParams],
    list[LogprobOptions],
    list[list[int]],
    list[list[float]],
    list[list[int]],
    list[set[int] | None],
]


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    size, vocabulary, width = draw(st.integers(1, 5)), draw(st.integers(8, 40)), draw(st.integers(1, 6))
    score = st.sampled_from([-float("inf"), -0.0, *map(float, range(-3, 4)), 0.0, 1.0, 1.0, 2.0])

    def rows_of(entry: st.SearchStrategy, length: int) -> list:  # type: ignore[type-arg]
        return draw(st.lists(st.lists(entry, min_size=length, max_size=length), min_size=size, max_size=size))

    def per_row(entry: st.SearchStrategy) -> list:  # type: ignore[type-arg]
        return draw(st.lists(entry, min_size=size, max_size=size))

    return (
        per_row(samplings),
        per_row(details),
        per_row(st.one_of(*(st.lists(st.integers(0, most), max_size=8) for most in (2, vocabulary - 1)))),
        rows_of(score, vocabulary),
        rows_of(st.integers(0, vocabulary - 1), width),
        per_row(st.one_of(st.none(), st.none(), st.sets(st.integers(0, vocabulary - 1), max_size=5))),
    )


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
        mock.patch.multiple(logits_processors, _LIST_STEP=4, _TIE_MARGIN=2, _MAX_TOPK=9, _CPU_BLOCK_SCORES=50),
        mock.patch.object(sampler, "_TOP_P_CANDIDATES", 2),
    ):
        yield


@given(
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), batches(), st.lists(st.integers(0, 50), max_size=3)
)
@settings(max_examples=60)
def test_rows_match_the_naive_sampler(dtype: torch.dtype, batch: Batch, eos: list[int]) -> None:
    params, asked, outputs, logits, context, allowed = batch
    rows = [make_row(s, d, output=own) for s, d, own in zip(params, asked, outputs, strict=True)]
    ends = sorted({token for token in eos if token < len(logits[0])})
    for i, row in enumerate(rows):
        chosen = allowed[i] if ends and not {*ends} & {*outputs[i]} else None
        if chosen is not None:
            row.grammar = grammar_of(chosen - {*ends}, outputs[i], ends, len(logits[0]))
        allowed[i] = None if chosen is None else chosen | {*ends}
    sampled = sample_batch(rows, torch.tensor(logits, dtype=dtype), context, eos)
    for i, sampling in enumerate(params):
        generated = len(outputs[i])
        expected = oracle.process(logits[i], sampling, generated, ends, context[i] + outputs[i], outputs[i], allowed[i])
        bad = expected.scores.max() == -float("inf")
        assert (i in sampled.invalid) == bad
        if bad or expected.ambiguous:
            continue
        oracle.check_token(sampled.tokens[i], expected, sampling, generated)
        details = asked[i]
        if details.generated_tokens and (details.logprobs or details.ranks or details.top_n_tokens):
            found = sampled.logprobs[i]
            assert found is not None
            oracle.check_logprobs(found, sampled.tokens[i], expected, details)
        else:
            assert not sampled.logprobs or sampled.logprobs[i] is None
