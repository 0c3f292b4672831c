"""tgis.frontend.validation: against the rules of the specification written out once more."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tgis.api.grpc.convert import field_path
from tgis.errors import InvalidRequest
from tgis.frontend.params import Constraints, Params
from tgis.frontend.validation import RequestLimits, make_request, validate
from tgis.ipc.lookups import AdapterRef, GrammarKind, GrammarSpec
from tgis.ipc.request import LogprobOptions, Request, SamplingParams

LIMITS = RequestLimits(
    max_sequence_length=200, max_new_tokens=169, include_stop_sequence=True, max_grammar_bytes=100, vocab_size=1000
)

SAMPLING_ONLY = "temperature", "top_k", "top_p", "typical_p", "min_p"
FLOATS = st.sampled_from(
    [0.0, -0.0, 0.02, 0.049, 0.05, 0.5, 1.0, 1.0001, 2.5, 10.0, 10.5, -1.0, math.nan, math.inf, -math.inf]
)
GRAMMARS = {  # and whether they break a rule
    GrammarSpec(GrammarKind.JSON_OBJECT): False,
    GrammarSpec(GrammarKind.JSON_SCHEMA, "{}"): False,
    GrammarSpec(GrammarKind.JSON_SCHEMA, ""): True,
    GrammarSpec(GrammarKind.REGEX, ""): True,
    GrammarSpec(GrammarKind.REGEX, "é" * 50): False,
    GrammarSpec(GrammarKind.GRAMMAR, "é" * 50 + "a"): True,
    GrammarSpec(GrammarKind.CHOICE, choices=("a", "")): False,
    GrammarSpec(GrammarKind.CHOICE, choices=("a",)): True,
    GrammarSpec(GrammarKind.CHOICE): True,
    GrammarSpec(GrammarKind.CHOICE, choices=("a" * 50, "b" * 51)): True,
}
PARAMETERS = st.builds(  # as clients of TGIS send them: zero is unset, None is absent
    SimpleNamespace,
    do_sample=st.booleans(),
    temperature=st.one_of(st.none(), FLOATS),
    top_k=st.sampled_from([0, 1, 50, 2**31 - 1, 2**31, 2**32 - 1]),
    top_p=FLOATS,
    typical_p=FLOATS,
    seed=st.one_of(st.none(), st.integers(0, 2**64 - 1)),
    max_new_tokens=st.sampled_from([0, 1, 19, 20, 21, 169, 170, 2**32 - 1]),
    min_new_tokens=st.sampled_from([0, 1, 20, 21, 169]),
    time_limit_millis=st.sampled_from([0, 1, 5000]),
    stop_sequences=st.lists(st.sampled_from(["a", "", "é" * 120, "é" * 120 + "a", "x" * 241]), max_size=8).map(tuple),
    include_stop_sequence=st.one_of(st.none(), st.booleans()),
    logprob_options=st.builds(
        LogprobOptions,
        generated_tokens=st.booleans(),
        input_tokens=st.booleans(),
        logprobs=st.booleans(),
        ranks=st.booleans(),
        top_n_tokens=st.sampled_from([0, 1, 10, 11]),
    ),
    repetition_penalty=FLOATS,
    length_penalty=st.one_of(st.none(), st.tuples(st.integers(0, 50), FLOATS)),
    grammar=st.sampled_from([*[None] * 20, *GRAMMARS]),
    min_p=FLOATS,
    stop_token_ids=st.sampled_from([(), (), (0, 999), (1,) * 128, (1,) * 129, (1000,), (-1,)]),
    allowed_token_ids=st.sampled_from([None, None, (), (0, 999), (1,) * 1024, (1,) * 1025, (1000,), (-1,)]),
    bad_words=st.sampled_from(
        [(), (), ("a",) * 128, ("a",) * 129, ("é" * 1024,), ("é" * 1024, "a"), ("a", " \n"), ("",)]
    ),
)


def finite(value: float | None) -> bool:
    return value is None or math.isfinite(value)


def first_violated(p: SimpleNamespace) -> str | None:
    """The field of the first rule that the parameters violate, in the order of the specification."""
    stops = p.stop_sequences
    max_new = p.max_new_tokens or 20
    decay = p.length_penalty[1] if p.length_penalty else 1.0
    wants_detail = p.logprob_options.logprobs or p.logprob_options.ranks or p.logprob_options.top_n_tokens != 0
    temperature = 1.0 if p.temperature is None else p.temperature
    table: list[tuple[str, bool]] = [
        ("sampling.temperature", p.do_sample and temperature != 0 and temperature < 0.05),
        ("sampling.top_p", p.do_sample and p.top_p != 0 and (p.top_p < 0 or p.top_p > 1)),
        ("sampling.typical_p", p.do_sample and p.typical_p > 1),
        ("sampling.top_k", p.do_sample and p.top_k >= 2**31),
        ("stopping.max_new_tokens", max_new > 169),
        ("stopping.min_new_tokens", p.min_new_tokens > max_new),
        ("decoding.repetition_penalty", p.repetition_penalty < 0),
        ("decoding.length_penalty.decay_factor", math.isnan(decay) or decay < 1 or decay > 10),
        ("stopping.stop_sequences", len(stops) > 6),
        ("response", wants_detail and not p.logprob_options.generated_tokens and not p.logprob_options.input_tokens),
        ("stopping.stop_sequences", any(s == "" or len(s.encode("utf-8")) > 240 for s in stops)),
        # not in the specification: TGIS lets these through
        ("sampling.typical_p", p.do_sample and p.typical_p < 0),
        ("response.top_n_tokens", p.logprob_options.top_n_tokens > 10),
        ("sampling.min_p", p.do_sample and not 0 <= p.min_p <= 1),
        ("decoding.allowed_token_ids", p.allowed_token_ids == ()),
        ("decoding.bad_words", len(p.bad_words) > 128 or any(word.isspace() or not word for word in p.bad_words)),
        ("decoding.bad_words", len("".join(p.bad_words).encode()) > 2048),
        ("sampling.temperature", p.do_sample and not finite(temperature)),
        ("sampling.top_p", p.do_sample and not finite(p.top_p)),
        ("sampling.typical_p", p.do_sample and not finite(p.typical_p)),
        ("decoding.repetition_penalty", not finite(p.repetition_penalty)),
        ("stopping.stop_token_ids", len(p.stop_token_ids) > 128 or any(not 0 <= t < 1000 for t in p.stop_token_ids)),
        ("decoding.allowed_token_ids", len(p.allowed_token_ids or ()) > 1024),
        ("decoding.allowed_token_ids", any(not 0 <= token < 1000 for token in p.allowed_token_ids or ())),
        (f"decoding.{p.grammar and p.grammar.kind}", p.grammar is not None and GRAMMARS[p.grammar]),
    ]
    return next((field for field, violated in table if violated), None)


def params_of(raw: SimpleNamespace) -> Params:
    """As an API makes them."""
    fields = {name: value for name, value in vars(raw).items() if value or name in ("temperature", "allowed_token_ids")}
    if not raw.do_sample:
        fields = {name: value for name, value in fields.items() if name not in SAMPLING_ONLY} | {"temperature": 0.0}
    return Params.of(fields, seed=raw.seed, include_stop_sequence=raw.include_stop_sequence)


def with_min(min_new_tokens: int, **fields: Any) -> Params:
    return Params(sampling=SamplingParams(min_new_tokens=min_new_tokens), **fields)


def validated(params: Params, limits: RequestLimits = LIMITS) -> Params:
    validate(params, limits)
    return params


def reported(raw: SimpleNamespace) -> str | None:
    """The field that validation names."""
    try:
        validate(params_of(raw), LIMITS)
    except InvalidRequest as error:
        return field_path(error.field).removeprefix("params.")
    return None


def request_of(length: int, params: Params, limits: RequestLimits, adapter: AdapterRef | None = None) -> Request:
    """The request for an input of this length."""
    return make_request([5] * length, adapter, params, limits, "x", id=1)


@settings(max_examples=500)  # about every tenth breaks no rule
@given(PARAMETERS)
def test_the_first_violated_rule_is_reported_and_defaults_replace_zero_and_absent(raw: SimpleNamespace) -> None:
    if field := first_violated(raw):
        assert reported(raw) == field
        return
    params = validated(params_of(raw))
    sampling = params.sampling_params(5)
    greedy = not raw.do_sample or raw.temperature == 0
    assert sampling.greedy == greedy
    assert params.max_new_tokens == (raw.max_new_tokens or 20)
    assert sampling.repetition_penalty == (raw.repetition_penalty or 1.0)
    assert sampling.stop_token_ids == raw.stop_token_ids
    assert sampling.allowed_token_ids == raw.allowed_token_ids
    assert sampling.min_p == (0.0 if greedy else raw.min_p)
    include = raw.include_stop_sequence
    assert params.include_stop_sequence == (True if include is None else include)
    if greedy:
        assert (sampling.top_k, sampling.top_p, sampling.typical_p) == (0, 1.0, 1.0)
    else:
        assert sampling.temperature == (1.0 if raw.temperature is None else raw.temperature)
        assert (sampling.top_k, sampling.top_p) == (raw.top_k, raw.top_p or 1.0)
        assert sampling.typical_p == (raw.typical_p or 1.0)


@settings(max_examples=200)
@given(st.integers(0, 230), st.integers(0, 40), st.integers(1, 169), st.integers(0, 169))
def test_the_sequence_length_limits_the_output(length: int, prefix: int, max_new: int, min_new: int) -> None:
    min_new = min(min_new, max_new)
    params = validated(with_min(min_new, max_new_tokens=max_new))
    soft = AdapterRef("p", prefix, 0, 1, 1) if prefix else None
    if length == 0 or length + prefix >= 200 or length + prefix + min_new > 200:
        with pytest.raises(InvalidRequest):
            request_of(length, params, LIMITS, soft)
        return
    request = request_of(length, params, LIMITS, soft)
    assert request.max_new_tokens == min(max_new, 200 - length - prefix)
    assert request.limited_by_context == (length + prefix + max_new > 200)


@pytest.mark.parametrize(
    ("limits", "length", "expected"),
    [
        ({}, 100, 100),  # what the sequence length leaves
        ({}, 20, 169),  # MAX_NEW_TOKENS
        ({"max_request_tokens": 150}, 100, 50),  # what fits into memory
        ({"max_positions": 120}, 20, 120),  # decoder positions
    ],
)
def test_without_max_new_tokens_all_that_fits(limits: dict[str, Any], length: int, expected: int) -> None:
    context = replace(LIMITS, default_max_new_tokens=None, **limits)
    request = request_of(length, validated(Params(), context), context)
    assert (request.max_new_tokens, request.limited_by_context) == (expected, True)
    asked = request_of(length, validated(Params(max_new_tokens=7), context), context)
    assert (asked.max_new_tokens, asked.limited_by_context) == (7, False)


def test_without_max_new_tokens_the_least_is_still_checked() -> None:
    """As in vllm-tgis-adapter, the minimum may be as high as the server's maximum."""
    context = replace(LIMITS, default_max_new_tokens=None, max_request_tokens=110)
    assert validated(with_min(169), context).max_new_tokens == 169
    with pytest.raises(InvalidRequest, match="min_new_tokens must be <= max_new_tokens"):
        validated(with_min(170), context)
    params = validated(with_min(11), context)
    with pytest.raises(InvalidRequest, match=r"input and new tokens \(111\) are more than fit into memory \(110\)"):
        request_of(100, params, context)


def test_a_face_may_refuse_an_output_that_does_not_fit() -> None:
    constraints = Constraints(min_room=60)
    for asked, fits in ((100, False), (60, False), (50, True)):
        params = validated(Params(max_new_tokens=asked, constraints=constraints))
        if fits:
            assert request_of(150, params, LIMITS).max_new_tokens == asked
            continue
        with pytest.raises(InvalidRequest, match=rf"plus max_new_tokens \({asked}\) must be <= 200"):
            request_of(150, params, LIMITS)
    params = validated(Params(max_new_tokens=100, constraints=constraints))
    assert request_of(130, params, LIMITS).max_new_tokens == 70


def test_outputs_of_one_input_count_up_from_its_seed() -> None:
    given = validated(Params(sampling=SamplingParams(temperature=1.0), seed=2**64 - 2))
    assert [given.sampling_params(5, number).seed for number in range(3)] == [2**64 - 2, 2**64 - 1, 0]
    drawn = validated(Params(sampling=SamplingParams(temperature=1.0)))
    assert [drawn.sampling_params(seed, number).seed for number, seed in enumerate((7, 9))] == [7, 9]
    assert validated(Params(seed=4)).sampling_params(5, 1).seed == 0  # greedy


def test_another_default_of_max_new_tokens() -> None:
    limits = replace(LIMITS, default_max_new_tokens=50)
    assert validated(Params(), limits).max_new_tokens == 50
    assert validated(Params(max_new_tokens=7), limits).max_new_tokens == 7


@pytest.mark.parametrize(("decoder", "positions"), [(0, (18, 20)), (3, (14, 23))])
def test_positions_of_encoder_and_decoder(decoder: int, positions: tuple[int, int]) -> None:
    """Eight virtual tokens; with those of a decoder, the start token is one of them."""
    request = request_of(10, validated(Params()), LIMITS, AdapterRef("p", 8, decoder, 1, 1))
    assert (request.soft_prompt_length, request.input_length) == (8, 10)
    assert (request.input_positions, request.output_positions) == positions
