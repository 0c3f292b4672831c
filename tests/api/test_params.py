"""From the body of a request to parameters, for each API: what is sent, and what differs from the defaults."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from google.protobuf import json_format

from tgis.api.grpc import convert as grpc_convert
from tgis.api.openai.bodies import ChatCompletionRequest, CompletionRequest
from tgis.api.openai.params import chat_params, completion_params
from tgis.api.tgi import convert as tgi_convert
from tgis.api.tgi.schema import GenerateParameters
from tgis.config import Config
from tgis.frontend.params import Params
from tgis.frontend.validation import RequestLimits
from tgis.ipc.lookups import GrammarKind, GrammarSpec
from tgis.ipc.request import LogprobOptions, SamplingParams
from tgis.pb import generation_pb2 as pb

CONVERTED_BY_HAND = {"format", "json_schema", "regex", "choice"}  # to a GrammarSpec


def differences(struct: msgspec.Struct, default: msgspec.Struct) -> dict[str, Any]:
    values, defaults = map(msgspec.structs.asdict, (struct, default))
    return {name: value for name, value in values.items() if value != defaults[name]}


def described(params: Params, *ignored: str) -> dict[str, Any]:
    """The parameters that are not at their defaults, without those that an API always sets."""
    given = differences(params, Params()) | differences(params.sampling, SamplingParams())
    kept = {name: value for name, value in given.items() if name not in ("sampling", "constraints", *ignored)}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in kept.items() if value != []}


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({}, {}),
        ({"sampling": {"temperature": 0.5, "topP": 7, "topK": 2}}, {}),  # greedy
        ({"method": "SAMPLE"}, {"temperature": 1.0}),
        ({"method": "SAMPLE", "sampling": {"temperature": 0, "topP": 0.5}}, {"top_p": 0.5}),
        ({"method": "SAMPLE", "sampling": {"seed": 0, "topP": -0.0, "typicalP": 0}}, {"temperature": 1.0, "seed": 0}),
        (
            {"method": "SAMPLE", "sampling": {"temperature": 0.5, "topK": 2, "typicalP": 0.25, "minP": 0.125}},
            {"temperature": 0.5, "top_k": 2, "typical_p": 0.25, "min_p": 0.125},
        ),
        (
            {"stopping": {"maxNewTokens": 9, "minNewTokens": 3, "timeLimitMillis": 7, "stopSequences": ["a", "b"]}},
            {"max_new_tokens": 9, "min_new_tokens": 3, "time_limit_millis": 7, "stop_sequences": ("a", "b")},
        ),
        ({"stopping": {"includeStopSequence": False}}, {"include_stop_sequence": False}),
        (
            {"stopping": {"ignoreEos": True, "stopTokenIds": [4, 5]}, "truncateInputTokens": 6},
            {"ignore_eos": True, "stop_token_ids": (4, 5), "truncate_input_tokens": 6},
        ),
        (
            {"response": {"inputText": True, "tokenIds": True, "generatedTokens": True, "tokenLogprobs": True}},
            {
                "input_text": True,
                "token_ids": True,
                "logprob_options": LogprobOptions(generated_tokens=True, logprobs=True),
            },
        ),
        (
            {"response": {"inputTokens": True, "tokenRanks": True, "topNTokens": 3}},
            {"logprob_options": LogprobOptions(input_tokens=True, ranks=True, top_n_tokens=3)},
        ),
        ({"decoding": {"repetitionPenalty": -0.0, "lengthPenalty": {}}}, {"length_penalty": (0, 0.0)}),
        (
            {"decoding": {"repetitionPenalty": 1.5, "lengthPenalty": {"startIndex": 2, "decayFactor": 1.25}}},
            {"repetition_penalty": 1.5, "length_penalty": (2, 1.25)},
        ),
        (
            {"decoding": {"frequencyPenalty": 0.5, "presencePenalty": -0.5, "logitBias": {"3": 2}, "watermark": True}},
            {"frequency_penalty": 0.5, "presence_penalty": -0.5, "logit_bias": {3: 2.0}, "watermark": True},
        ),
        (
            {"decoding": {"badWords": ["x"], "allowedTokenIds": [1, 2]}},
            {"bad_words": ("x",), "allowed_token_ids": (1, 2)},
        ),
        ({"decoding": {"format": "TEXT"}}, {}),
        ({"decoding": {"regex": ""}}, {"grammar": GrammarSpec(GrammarKind.REGEX)}),
        ({"decoding": {"grammar": "g"}}, {"grammar": GrammarSpec(GrammarKind.GRAMMAR, "g")}),
        (
            {"decoding": {"choice": {"choices": ["a", "b"]}}},
            {"grammar": GrammarSpec(GrammarKind.CHOICE, choices=("a", "b"))},
        ),
    ],
)
def test_grpc(message: dict[str, Any], expected: dict[str, Any]) -> None:
    params = grpc_convert.params(json_format.ParseDict(message, pb.Parameters()))
    assert described(params) == expected
    assert type(params.sampling.logit_bias) in (dict, type(None))


def test_every_field_of_the_proto_is_a_parameter() -> None:
    sections = pb.SamplingParameters, pb.StoppingCriteria, pb.DecodingParameters
    names = {field.name for section in sections for field in section.DESCRIPTOR.fields}
    assert names - {*Params.__struct_fields__, *SamplingParams.__struct_fields__} == CONVERTED_BY_HAND


LIMITS = RequestLimits(max_sequence_length=200, max_new_tokens=100, include_stop_sequence=True)
CALL: Any = SimpleNamespace(
    config=Config(model_name="m"),
    generator=SimpleNamespace(server_info=SimpleNamespace(limits=LIMITS)),
    special_token_ids=lambda texts: (2,) if "</s>" in texts else (),
)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, {"temperature": 1.0}),
        ({"temperature": 0, "seed": 4}, {"seed": 4}),
        ({"temperature": 0.5, "top_p": 0, "top_k": -1}, {"temperature": 0.5, "top_p": 1e-9}),
        ({"top_p": 0.5, "top_k": 3, "min_p": 0.25}, {"temperature": 1.0, "top_p": 0.5, "top_k": 3, "min_p": 0.25}),
        ({"repetition_penalty": 0, "temperature": 0}, {"repetition_penalty": 0.0}),  # refused
        (
            {"temperature": 0, "repetition_penalty": 1.5, "frequency_penalty": 1, "presence_penalty": -1},
            {"repetition_penalty": 1.5, "frequency_penalty": 1.0, "presence_penalty": -1.0},
        ),
        (
            {"temperature": 0, "max_tokens": 1000, "min_tokens": 3, "truncate_prompt_tokens": -1},
            {"max_new_tokens": 100, "min_new_tokens": 3, "truncate_input_tokens": 199},
        ),
        (
            {"temperature": 0, "stop": ["a", "</s>"], "stop_token_ids": [7], "ignore_eos": True, "seed": -1},
            {"stop_sequences": ("a", "</s>"), "stop_token_ids": (7, 2), "ignore_eos": True, "seed": 2**64 - 1},
        ),
        (
            {"temperature": 0, "stop": "a", "include_stop_str_in_output": True, "logit_bias": {"3": -1}},
            {"stop_sequences": ("a",), "include_stop_sequence": True, "logit_bias": {3: -1.0}},
        ),
        (
            {"temperature": 0, "bad_words": ["x"], "allowed_token_ids": [1], "skip_special_tokens": False},
            {"bad_words": ("x",), "allowed_token_ids": (1,), "skip_special_tokens": False},
        ),
        ({"temperature": 0, "allowed_token_ids": []}, {"allowed_token_ids": ()}),  # refused
        ({"temperature": 0, "guided_regex": "a"}, {"grammar": GrammarSpec(GrammarKind.REGEX, "a")}),
        ({"temperature": 0, "guided_json": {}}, {"grammar": GrammarSpec(GrammarKind.JSON_SCHEMA, "{}")}),
        *(
            (
                {"temperature": 0, "response_format": {"type": "json_schema", "json_schema": {"schema": {}} | strict}},
                {"grammar": GrammarSpec(GrammarKind.JSON_SCHEMA, "{}", exact=bool(strict))},
            )
            for strict in ({}, {"strict": True})
        ),
    ],
)
def test_openai(body: dict[str, Any], expected: dict[str, Any]) -> None:
    expected = {"fill_context": True, "include_stop_sequence": False} | expected
    completion = completion_params(msgspec.convert(body | {"prompt": "p"}, CompletionRequest, strict=False), CALL)
    assert described(completion, "logprob_options") == expected
    message = {"messages": [{"role": "user", "content": "p"}]}
    chat = chat_params(msgspec.convert(body | message, ChatCompletionRequest, strict=False), CALL, parses_tools=False)
    assert described(chat, "logprob_options") == expected | {"add_special_tokens": False}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, {}),
        ({"temperature": 1.0}, {}),  # does not sample
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"temperature": 0.5, "seed": 3}, {"temperature": 0.5, "seed": 3}),
        (
            {"top_k": 2, "top_p": 0.5, "typical_p": 0.25},
            {"temperature": 1.0, "top_k": 2, "top_p": 0.5, "typical_p": 0.25},
        ),
        (
            {"repetition_penalty": 1.5, "frequency_penalty": 1.0, "watermark": True, "ignore_eos_token": True},
            {"repetition_penalty": 1.5, "frequency_penalty": 1.0, "watermark": True, "ignore_eos": True},
        ),
        (
            {"max_new_tokens": 3, "truncate": 5, "stop": ["a"], "stop_sequences": ["b"]},
            {"max_new_tokens": 3, "truncate_input_tokens": 5, "stop_sequences": ("a", "b")},
        ),
        ({"grammar": {"type": "regex", "value": "a"}}, {"grammar": GrammarSpec(GrammarKind.REGEX, "a")}),
    ],
)
def test_tgi(body: dict[str, Any], expected: dict[str, Any]) -> None:
    given = msgspec.json.decode(msgspec.json.encode(body), type=GenerateParameters)
    params = tgi_convert.params(given, CALL, details=False)
    always = {"fill_context": True, "include_stop_sequence": True, "skip_special_tokens": True}
    assert described(params, "logprob_options") == always | expected
