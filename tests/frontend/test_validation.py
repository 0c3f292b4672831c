"""Validation against the rules written out once more: which one fails first, and what is left if none does."""

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tgis.api.grpc.convert import field_path
from tgis.errors import InvalidRequest, Unimplemented
from tgis.frontend.sampling_params import RawParams
from tgis.frontend.validation import RequestLimits, make_request, validate
from tgis.ipc.adapters import AdapterRef
from tgis.ipc.request import LogprobOptions

LIMITS = RequestLimits(max_sequence_length=200, max_new_tokens=169, include_stop_sequence=True)

FLOATS = st.sampled_from(
    [0.0, -0.0, 0.02, 0.049, 0.05, 0.5, 1.0, 1.0001, 2.5, 10.0, 10.5, -1.0, math.nan, math.inf, -math.inf]
)
PARAMETERS = st.builds(
    RawParams,
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
    guided=st.sampled_from(["", "", "", "regex"]),
)


def finite(value: float | None) -> bool:
    return value is None or math.isfinite(value)


def first_broken(p: RawParams) -> str | None:
    """The field of the first rule that the parameters break, straight from the table of the specification."""
    stops = p.stop_sequences
    most = p.max_new_tokens or 20
    decay = p.length_penalty[1] if p.length_penalty else 1.0
    wants_detail = p.logprob_options.logprobs or p.logprob_options.ranks or p.logprob_options.top_n_tokens != 0
    temperature = 1.0 if p.temperature is None else p.temperature
    table: list[tuple[str, bool]] = [
        ("guided", p.guided != ""),
        ("sampling.temperature", p.do_sample and not finite(temperature)),
        ("sampling.top_p", p.do_sample and not finite(p.top_p)),
        ("sampling.typical_p", p.do_sample and not finite(p.typical_p)),
        ("decoding.repetition_penalty", not finite(p.repetition_penalty)),
        ("decoding.length_penalty.decay_factor", not finite(decay)),
        ("sampling.temperature", p.do_sample and temperature != 0 and temperature < 0.05),
        ("sampling.top_p", p.do_sample and p.top_p != 0 and (p.top_p < 0 or p.top_p > 1)),
        ("sampling.typical_p", p.do_sample and (p.typical_p < 0 or p.typical_p > 1)),
        ("sampling.top_k", p.do_sample and p.top_k >= 2**31),
        ("stopping.max_new_tokens", most > 169),
        ("stopping.min_new_tokens", p.min_new_tokens > most),
        ("decoding.repetition_penalty", p.repetition_penalty < 0),
        ("decoding.length_penalty.decay_factor", decay < 1 or decay > 10),
        ("stopping.stop_sequences", len(stops) > 6),
        ("response", wants_detail and not p.logprob_options.generated_tokens and not p.logprob_options.input_tokens),
        ("response.top_n_tokens", p.logprob_options.top_n_tokens > 10),
        ("stopping.stop_sequences", any(s == "" or len(s.encode("utf-8")) > 240 for s in stops)),
    ]
    return next((field for field, broken in table if broken), None)


@settings(max_examples=1500, deadline=None)
@given(PARAMETERS)
def test_the_first_rule_broken_is_the_one_reported(asked: RawParams) -> None:
    assert reported(asked) == first_broken(asked)


def reported(asked: RawParams) -> str | None:
    """The field that validation names."""
    try:
        validate(asked, LIMITS)
    except InvalidRequest as error:
        return field_path(error.field).removeprefix("params.")
    except Unimplemented:
        return "guided"
    return None


@settings(max_examples=300, deadline=None)
@given(PARAMETERS.filter(lambda p: first_broken(p) is None))
def test_defaults_fill_what_is_zero_or_absent(asked: RawParams) -> None:
    found = validate(asked, LIMITS)
    greedy = not asked.do_sample or asked.temperature == 0
    assert found.sampling_params.greedy == greedy
    assert found.max_new_tokens == (asked.max_new_tokens or 20)
    assert found.sampling_params.repetition_penalty == (asked.repetition_penalty or 1.0)
    assert (found.deadline is None) == (asked.time_limit_millis == 0)
    include = asked.include_stop_sequence
    assert found.include_stop_sequence == (True if include is None else include)
    if greedy:
        assert (found.sampling_params.top_k, found.sampling_params.top_p, found.sampling_params.typical_p) == (
            0,
            1.0,
            1.0,
        )
    else:
        assert found.sampling_params.temperature == (1.0 if asked.temperature is None else asked.temperature)
        assert (found.sampling_params.top_k, found.sampling_params.top_p) == (asked.top_k, asked.top_p or 1.0)
        assert found.sampling_params.typical_p == (asked.typical_p or 1.0)


@settings(max_examples=500, deadline=None)
@given(st.integers(0, 230), st.integers(0, 40), st.integers(1, 169), st.integers(0, 169))
def test_lengths_bound_the_output(length: int, prefix: int, most: int, least: int) -> None:
    asked = RawParams(max_new_tokens=most, min_new_tokens=min(least, most))
    found, least = validate(asked, LIMITS), min(least, most)
    soft = AdapterRef("p", prefix, 0, 1, 1) if prefix else None
    arguments: dict[str, Any] = {"adapter": soft, "params": found, "limits": LIMITS, "field": "x"}
    if length == 0 or length + prefix >= 200 or length + prefix + least > 200:
        with pytest.raises(InvalidRequest):
            make_request(1, [5] * length, **arguments)
        return
    request = make_request(1, [5] * length, **arguments)
    assert request.max_new_tokens == min(most, 200 - length - prefix)
    assert request.limited_by_context == (length + prefix + most > 200)


@pytest.mark.parametrize(("decoder", "places"), [(0, (18, 20)), (3, (14, 23))])
def test_places_are_those_of_the_side_that_they_are_on(decoder: int, places: tuple[int, int]) -> None:
    """Eight virtual tokens; with those of a decoder, the start token is one of them."""
    found = validate(RawParams(), LIMITS)
    request = make_request(1, [5] * 10, AdapterRef("p", 8, decoder, 1, 1), found, LIMITS, "x")
    assert (request.soft_prompt_length, request.input_length) == (8, 10)
    assert (request.input_positions, request.output_positions) == places
