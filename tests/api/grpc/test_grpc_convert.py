"""From messages of gRPC to parameters and calls, and from outputs to messages, field by field."""

import math
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from described_params import described
from google.protobuf import json_format

from tgis.api.grpc import convert
from tgis.errors import InvalidRequest
from tgis.frontend.calls import CallKind, GenerateCall, TokenizeCall
from tgis.frontend.output import RequestOutput, TokenInfo
from tgis.frontend.params import Params
from tgis.frontend.tokenizer import Encoding
from tgis.ipc.lookups import GrammarKind, GrammarSpec
from tgis.ipc.request import LogprobOptions, SamplingParams, StopReason
from tgis.pb import generation_pb2 as pb

CONVERTED_BY_HAND = {"format", "json_schema", "regex", "choice"}  # to a GrammarSpec


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
def test_parameters(message: dict[str, Any], expected: dict[str, Any]) -> None:
    params = convert.params(json_format.ParseDict(message, pb.Parameters()))
    assert described(params) == expected
    assert type(params.sampling.logit_bias) in (dict, type(None))


def test_every_field_of_the_proto_is_a_parameter() -> None:
    sections = pb.SamplingParameters, pb.StoppingCriteria, pb.DecodingParameters
    names = {field.name for section in sections for field in section.DESCRIPTOR.fields}
    assert names - {*Params.__struct_fields__, *SamplingParams.__struct_fields__} == CONVERTED_BY_HAND


PARAMS: Any = {"stopping": {"max_new_tokens": 3}}
TEXTS = [{"text": "a"}, {"text": "b"}]


@pytest.mark.parametrize(
    ("message", "kind", "texts", "fields", "adapter"),
    [
        (pb.BatchedGenerationRequest(requests=TEXTS[:1]), "single", ["a"], ["requests[0].text"], None),
        (
            pb.BatchedGenerationRequest(requests=TEXTS, prefix_id="p"),
            "batch",
            ["a", "b"],
            ["requests[0].text", "requests[1].text"],
            ("prefix_id", "p"),
        ),
        (pb.BatchedGenerationRequest(prefix_id=""), "batch", [], [], ("prefix_id", "")),
        (
            pb.SingleGenerationRequest(request=TEXTS[0], prefix_id="p", adapter_id="l"),
            "stream",
            ["a"],
            ["request.text"],
            ("adapter_id", "l"),
        ),
        (pb.SingleGenerationRequest(adapter_id=""), "stream", [], ["request.text"], None),  # it is missing
    ],
)
def test_calls(message: Any, kind: str, texts: list[str], fields: list[str], adapter: Any) -> None:
    message.params.stopping.max_new_tokens = 3
    call = convert.generate_call(message, b"client", b"identity", [("a", "b")], 7.0)
    expected = {"client": b"client", "identity": b"identity", "headers": [("a", "b")], "answer_deadline": 7.0}
    params = call.params
    assert params.max_new_tokens == 3
    assert call == GenerateCall(CallKind(kind), texts, fields, params, adapter=adapter, **expected)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "path"),
    [
        ("temperature", "params.sampling.temperature"),
        ("max_new_tokens", "params.stopping.max_new_tokens"),
        ("json_object", "params.decoding.format"),
        ("decay_factor", "params.decoding.length_penalty.decay_factor"),
        ("logprob_options", "params.response"),
        ("top_n_tokens", "params.response.top_n_tokens"),
        ("requests[1].text", "requests[1].text"),
    ],
)
def test_paths_of_fields(field: str, path: str) -> None:
    assert convert.field_path(field) == path


A = TokenInfo(5, "a", -0.5, 1, [(5, "a", -0.5), (256, "</s>", -1.5)])
B = TokenInfo(256, "</s>", 0.0, 0, [])
A_MESSAGE = {"text": "a", "logprob": -0.5, "rank": 1}
TOPS = [{"text": "a", "logprob": -0.5}, {"text": "</s>", "logprob": -1.5}]


@pytest.mark.parametrize(
    ("output", "ids", "expected"),
    [
        (RequestOutput(text="é", generated_token_count=2), False, {"text": "é", "generated_token_count": 2}),
        (RequestOutput(input_token_count=3, seed=2**64 - 1), False, {"input_token_count": 3, "seed": str(2**64 - 1)}),
        (
            RequestOutput(
                text="x",
                input_token_count=3,
                generated_token_count=2,
                stop_reason=StopReason.STOP_SEQUENCE,
                stop_sequence="x",
            ),
            False,
            {
                "text": "x",
                "input_token_count": 3,
                "generated_token_count": 2,
                "stop_reason": "STOP_SEQUENCE",
                "stop_sequence": "x",
            },
        ),
        (
            RequestOutput(tokens=[A, B], input_tokens=iter([B])),
            False,
            {"tokens": [A_MESSAGE | {"top_tokens": TOPS}, {"text": "</s>"}], "input_tokens": [{"text": "</s>"}]},
        ),
        (
            RequestOutput(tokens=[A], input_tokens=iter([B])),
            True,
            {
                "tokens": [
                    A_MESSAGE | {"top_tokens": [TOPS[0] | {"id": 5}, TOPS[1] | {"id": 256, "special": True}], "id": 5}
                ],
                "input_tokens": [{"text": "</s>", "id": 256, "special": True}],
            },
        ),
        *((RequestOutput(stop_reason=r), False, {"stop_reason": r.name}) for r in StopReason if r),
    ],
)
def test_responses(output: RequestOutput, ids: bool, expected: dict[str, Any]) -> None:
    response = convert.generate_response([output], (lambda id_: id_ == 256) if ids else None)
    found = json_format.MessageToDict(response, preserving_proto_field_name=True)
    assert found.get("responses") == [expected]


@pytest.mark.parametrize("encoder_decoder", [False, True])
def test_model_info(encoder_decoder: bool) -> None:
    limits = SimpleNamespace(max_sequence_length=200, max_new_tokens=100)
    info: Any = SimpleNamespace(limits=limits, engine=SimpleNamespace(encoder_decoder=encoder_decoder))
    expected = pb.ModelInfoResponse(model_kind=int(encoder_decoder), max_sequence_length=200, max_new_tokens=100)  # type: ignore[arg-type]
    assert convert.model_info_response(info) == expected


VOCABULARY = ["", "a", "Ġfirst", "<0x0A>", "ü🦙" * 40, "x" * 127, "x" * 128, "\0"]


def test_replies_to_tokenize() -> None:
    spans = [(0, 0), (0, 1), (127, 128), (4_000_000, 2**32 - 1)]
    encodings, expected = [], []
    for count, tokens, offsets in [(0, [], []), (7, VOCABULARY, []), (300, [], spans), (8, VOCABULARY, spans * 500)]:
        ends = array("I", [end for span in offsets for end in span])
        encodings.append(Encoding(array("I", range(len(tokens))), ends, count))
        placed = [{"start": start, "end": end} for start, end in offsets]
        expected.append(pb.TokenizeResponse(token_count=count, tokens=tokens, offsets=placed))
    whole = pb.BatchedTokenizeResponse(responses=expected).SerializeToString()
    assert convert.tokenize_response(encodings, VOCABULARY.__getitem__, len(whole)) == whole
    with pytest.raises(InvalidRequest, match=f"the reply has more than {len(whole) - 1} bytes"):
        convert.tokenize_response(encodings, VOCABULARY.__getitem__, len(whole) - 1)


@pytest.mark.parametrize(("tokens", "offsets"), [(True, False), (False, True), (True, True), (False, False)])
def test_calls_to_tokenize_ask_for_no_more_tokens_than_a_reply_has_room_for(tokens: bool, offsets: bool) -> None:
    message = pb.BatchedTokenizeRequest(requests=TEXTS, return_tokens=tokens, return_offsets=offsets, prefix_id="p")  # type: ignore[arg-type]
    message.truncate_input_tokens = 4
    call = convert.tokenize_call(message, max_reply_bytes=12_000)
    assert call == TokenizeCall(["a", "b"], 4, tokens, offsets, ("prefix_id", "p"), max_tokens=call.max_tokens)
    smallest = pb.TokenizeResponse(tokens=["a"] * tokens, offsets=[{"start": 128, "end": 129}] * offsets).ByteSize()
    limit = 12_000 // smallest if smallest else math.inf
    assert limit <= (math.inf if call.max_tokens is None else call.max_tokens) <= (4000 if smallest else math.inf)
