"""tgis.frontend.validation: the rules in their order, and how long an output may be."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import table

from tgis.errors import InvalidRequest
from tgis.frontend.params import Constraints, Params
from tgis.frontend.validation import RequestLimits, make_request, validate
from tgis.ipc.lookups import AdapterRef, GrammarKind, GrammarSpec
from tgis.ipc.request import LogprobOptions, Request, SamplingParams

LIMITS = RequestLimits(
    max_sequence_length=200, max_new_tokens=169, include_stop_sequence=True, max_grammar_bytes=100, vocab_size=1000
)

LONG = "é" * 514  # 1028 bytes


def expanded(value: Any) -> Any:
    """Long lists and texts, which the table abbreviates."""
    match value:
        case str() if value.endswith(" tokens"):
            return tuple([7] * int(value.split()[0]))
        case str() if value.endswith(" a"):
            return tuple("a" * int(value.split()[0]))
        case "2 éééé…":
            return (LONG, LONG)
        case list():
            return tuple(LONG if item == "éééé…" else expanded(item) for item in value)
    return value


def params_of(given: dict[str, Any]) -> Params:
    """As an API makes them."""
    fields = {name: expanded(value) for name, value in given.items()}
    if isinstance(given.get("logit_bias"), str):
        fields["logit_bias"] = dict.fromkeys(range(len(fields["logit_bias"])), 1.0)
    if "grammar" in fields:
        kind, *more = fields["grammar"]
        fields["grammar"] = GrammarSpec(GrammarKind(kind), *more)
    options = LogprobOptions(**fields.pop("logprob_options", {}))
    return Params.of(fields, logprob_options=options)


def with_min(min_new_tokens: int, **fields: Any) -> Params:
    return Params(sampling=SamplingParams(min_new_tokens=min_new_tokens), **fields)


def validated(params: Params, limits: RequestLimits = LIMITS) -> Params:
    validate(params, limits)
    return params


def request_of(length: int, params: Params, limits: RequestLimits, adapter: AdapterRef | None = None) -> Request:
    """The request for an input of this length."""
    return make_request([5] + [4] * (length - 1) if length else [], adapter, params, limits, "x", id=1)


RULES = [*table("validation", "rules").args[1]]


@table("validation", "rules")
def test_a_broken_rule_is_reported_unless_one_before_it_is_broken(row: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        validate(params_of(row["given"]), LIMITS)
    assert (caught.value.field, caught.value.detail) == (row["field"], row["text"])
    for later in RULES[RULES.index(row) + 1 :]:
        if not later["given"].keys() & row["given"].keys():
            with pytest.raises(InvalidRequest) as caught:
                validate(params_of(later["given"] | row["given"]), LIMITS)
            assert caught.value.field == row["field"], later


@table("validation", "valid")
def test_values_at_the_bounds_are_valid(row: dict[str, Any]) -> None:
    validate(params_of(row["given"]), LIMITS)


def test_defaults_are_filled_in() -> None:
    for asked, filled in ((0, (169, True)), (7, (7, False))):
        params = validated(Params(fill_context=True, max_new_tokens=asked))
        assert (params.max_new_tokens, params.fill_context) == filled
    params = validated(Params.of({"min_p": 0.5, "top_k": 3, "top_p": 0.5, "typical_p": 0.5}, temperature=0.0))
    assert (params.max_new_tokens, params.include_stop_sequence) == (20, True)
    assert params.sampling == SamplingParams()  # greedy decoding has no use for filters
    assert validated(Params.of({"top_k": 3})).sampling == SamplingParams(temperature=1.0, top_k=3)
    assert validated(Params(include_stop_sequence=False)).include_stop_sequence is False
    limits = replace(LIMITS, default_max_new_tokens=50)
    assert [validated(Params(max_new_tokens=n), limits).max_new_tokens for n in (0, 7)] == [50, 7]


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
    context = replace(LIMITS, default_max_new_tokens=None)
    assert validated(with_min(169), context).max_new_tokens == 169
    with pytest.raises(InvalidRequest, match="min_new_tokens must be <= max_new_tokens"):
        validated(with_min(170), context)


ROOM = Constraints(min_room=60)


def test_an_api_may_have_outputs_shortened_down_to_a_minimum() -> None:
    for length, asked, granted in ((140, 60, 60), (150, 50, 50), (130, 100, 70)):
        params = validated(Params(max_new_tokens=asked, constraints=ROOM))
        assert request_of(length, params, LIMITS).max_new_tokens == granted


@table("validation", "inputs")
def test_an_input_that_can_never_run_is_refused(row: dict[str, Any]) -> None:
    changed, params = replace(LIMITS, **row["limits"]), params_of(row["given"])
    if "min_room" in row:
        params.constraints = Constraints(min_room=row["min_room"])
    with pytest.raises(InvalidRequest) as caught:
        request_of(row["length"], validated(params, changed), changed)
    assert (caught.value.field, str(caught.value)) == ("x", row["text"])
    assert vars(caught.value).get("max_length", 200) == 200


def test_outputs_of_one_input_count_up_from_its_seed() -> None:
    given = validated(Params(sampling=SamplingParams(temperature=1.0), seed=2**64 - 2))
    assert [given.sampling_params(5, number).seed for number in range(3)] == [2**64 - 2, 2**64 - 1, 0]
    drawn = validated(Params(sampling=SamplingParams(temperature=1.0)))
    assert [drawn.sampling_params(seed, number).seed for number, seed in enumerate((7, 9))] == [7, 9]
    assert validated(Params(seed=4)).sampling_params(5, 1).seed == 0  # greedy


@pytest.mark.parametrize(("decoder", "positions"), [(0, (18, 20)), (3, (14, 23))])
def test_positions_of_encoder_and_decoder(decoder: int, positions: tuple[int, int]) -> None:
    """Eight virtual tokens; with those of a decoder, the start token is one of them."""
    request = request_of(10, validated(Params()), LIMITS, AdapterRef("p", 8, decoder, 1, 1))
    assert (request.soft_prompt_length, request.input_length) == (8, 10)
    assert (request.input_positions, request.output_positions) == positions
    context = replace(LIMITS, default_max_new_tokens=None, max_positions=50)
    filled = request_of(10, validated(Params(), context), context, AdapterRef("p", 8, decoder, 1, 1))
    assert filled.output_positions == 50
