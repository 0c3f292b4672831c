"""From messages of gRPC to parameters and calls, and from outputs to messages, field by field."""

import math
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from described_params import described
from google.protobuf import json_format
from scripted_api import output
from tables import table

from tgis.api.grpc import convert
from tgis.errors import InvalidRequest
from tgis.frontend.calls import CallKind, GenerateCall, TokenizeCall
from tgis.frontend.params import Params
from tgis.frontend.tokenizer import Encoding
from tgis.ipc.request import SamplingParams, StopReason
from tgis.pb import generation_pb2 as pb

CONVERTED_BY_HAND = {"format", "json_schema", "regex", "choice"}  # to a GrammarSpec


@table("parameters", "grpc")
def test_parameters(row: dict[str, Any]) -> None:
    params = convert.params(json_format.ParseDict(row["message"], pb.Parameters()))
    assert described(params) == row["params"]
    assert type(params.sampling.logit_bias) in (dict, type(None))


def test_every_field_of_the_proto_is_a_parameter() -> None:
    sections = pb.SamplingParameters, pb.StoppingCriteria, pb.DecodingParameters
    names = {field.name for section in sections for field in section.DESCRIPTOR.fields}
    assert names - {*Params.__struct_fields__, *SamplingParams.__struct_fields__} == CONVERTED_BY_HAND


Batch, Single = pb.BatchedGenerationRequest, pb.SingleGenerationRequest
TEXTS = [{"text": "a"}, {"text": "b"}]
FIRST, SECOND, ONLY = "requests[0].text", "requests[1].text", "request.text"


@pytest.mark.parametrize(
    ("message", "kind", "texts", "fields", "adapter"),
    [
        (Batch(requests=TEXTS[:1]), "single", ["a"], [FIRST], None),
        (Batch(requests=TEXTS, prefix_id="p"), "batch", ["a", "b"], [FIRST, SECOND], ("prefix_id", "p")),
        (Batch(prefix_id=""), "batch", [], [], ("prefix_id", "")),
        (Single(request=TEXTS[0], prefix_id="p", adapter_id="l"), "stream", ["a"], [ONLY], ("adapter_id", "l")),
        (Single(adapter_id=""), "stream", [], [ONLY], None),  # it is missing
    ],
)
def test_calls(message: Any, kind: str, texts: list[str], fields: list[str], adapter: Any) -> None:
    message.params.stopping.max_new_tokens = 3
    call = convert.generate_call(message, b"client", b"identity", [("a", "b")], 7.0)
    expected = {"client": b"client", "identity": b"identity", "headers": [("a", "b")], "answer_deadline": 7.0}
    params = call.params
    assert params.max_new_tokens == 3
    assert call == GenerateCall(CallKind(kind), texts, fields, params, adapter=adapter, **expected)  # type: ignore[arg-type]


def test_inputs_of_token_ids() -> None:
    call = convert.generate_call(Batch(requests=[{"token_ids": [3, 1]}, {"token_ids": [2**32 - 1]}]), b"", b"", ())
    assert (call.texts, call.fields) == (["", ""], ["requests[0].token_ids", "requests[1].token_ids"])
    assert [list(ids) for ids in call.token_ids or ()] == [[3, 1], [2**32 - 1]]


@table("refusals", "token ids of grpc")
def test_invalid_inputs_of_token_ids(row: dict[str, Any]) -> None:
    message = json_format.ParseDict(row["message"], Single() if "request" in row["message"] else Batch())
    with pytest.raises(InvalidRequest) as caught:
        convert.generate_call(message, b"", b"", ())
    assert (caught.value.field, str(caught.value)) == (row["field"], row["text"])


@table("errors", "paths of fields")
def test_paths_of_fields(row: dict[str, str]) -> None:
    assert convert.field_path(row["field"]) == row["grpc"]


@table("answers", "grpc")
def test_responses(row: dict[str, Any]) -> None:
    is_special = (lambda token_id: token_id == 256) if row["ids"] else None
    response = convert.generate_response([output(**row["output"])], is_special)
    fields = json_format.MessageToDict(response, preserving_proto_field_name=True)
    assert fields["responses"] == [row["response"]]


@pytest.mark.parametrize("reason", StopReason)
def test_stop_reasons_have_the_same_names(reason: StopReason) -> None:
    response = convert.fill_response(pb.GenerationResponse(), output(reason=reason.name), None)
    assert pb.StopReason.Name(response.stop_reason) == reason.name


@pytest.mark.parametrize("encoder_decoder", [False, True])
def test_model_info(encoder_decoder: bool) -> None:
    limits = SimpleNamespace(max_sequence_length=200, max_new_tokens=100)
    info: Any = SimpleNamespace(
        limits=limits, engine=SimpleNamespace(encoder_decoder=encoder_decoder, fingerprint="fp_1")
    )
    lengths = {"max_sequence_length": 200, "max_new_tokens": 100}
    expected = pb.ModelInfoResponse(model_kind=int(encoder_decoder), fingerprint="fp_1", **lengths)  # type: ignore[arg-type]
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
    message = pb.BatchedTokenizeRequest(requests=TEXTS, return_tokens=tokens, return_offsets=offsets, prefix_id="p")
    message.truncate_input_tokens = 4
    call = convert.tokenize_call(message, max_reply_bytes=12_000)
    assert call == TokenizeCall(["a", "b"], 4, tokens, offsets, ("prefix_id", "p"), max_tokens=call.max_tokens)
    smallest = pb.TokenizeResponse(tokens=["a"] * tokens, offsets=[{"start": 128, "end": 129}] * offsets).ByteSize()
    limit = 12_000 // smallest if smallest else math.inf
    assert limit <= (math.inf if call.max_tokens is None else call.max_tokens) <= (4000 if smallest else math.inf)
