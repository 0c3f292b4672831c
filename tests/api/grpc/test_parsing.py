"""A message with too many fields is refused before protobuf builds it; any other is parsed as protobuf does."""

import random
from collections.abc import Callable
from typing import TypeVar

import pytest
from fuzz_messages import mutated, random_message
from google.protobuf.message import DecodeError, Message

from tgis.api.grpc.parsing import parse
from tgis.errors import InvalidRequest
from tgis.pb import generation_pb2 as pb

T = TypeVar("T")

KINDS = [pb.BatchedGenerationRequest, pb.SingleGenerationRequest, pb.BatchedTokenizeRequest, pb.ModelInfoRequest]
HALF_A_MESSAGE = 2 << 20  # two-byte fields of the largest message


def parsed(read: Callable[[], T]) -> T | None:
    try:
        return read()
    except (DecodeError, InvalidRequest):
        return None


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_mean_what_protobuf_says(kind: type[Message]) -> None:
    draw = random.Random(kind.__name__)
    for _ in range(300):
        data = random_message(kind, draw).SerializeToString()
        for sent in (data, mutated(data, draw)):
            padded = sent + b"\x0a\x80\x09" + b"m" * 1152 if draw.random() < 0.5 else sent  # long: it gets counted
            expected = parsed(lambda: kind.FromString(padded))  # noqa: B023
            assert str(parsed(lambda: parse(padded, kind, 40))) == str(expected)  # noqa: B023


def test_as_many_inputs_as_allowed() -> None:
    texts = [pb.GenerationRequest(text="some text " * 20)] * 512
    sent = pb.BatchedGenerationRequest(requests=texts, params=pb.Parameters(truncate_input_tokens=3))
    assert parse(sent.SerializeToString(), pb.BatchedGenerationRequest, 512) == sent
    looks_like_fields = pb.ModelInfoRequest(model_id="\x08\x01" * 4096)  # the first byte of its length is 0x80
    assert parse(looks_like_fields.SerializeToString(), pb.ModelInfoRequest, 1) == looks_like_fields


def flood(field: bytes) -> bytes:
    return field * (HALF_A_MESSAGE // len(field))


STOPS = pb.Parameters(stopping=pb.StoppingCriteria(stop_sequences=[""] * 100_000))
CHOICES = pb.Parameters(decoding=pb.DecodingParameters(choice={"choices": ["a"] * 100_000}))
FLOODS = {
    "empty inputs": (pb.BatchedTokenizeRequest, flood(b"\x12\0")),
    "inputs with empty texts": (pb.BatchedGenerationRequest, flood(b"\x1a\x02\x12\0")),
    "parameters to merge": (pb.BatchedGenerationRequest, flood(b"\x52\0")),
    "requests to merge": (pb.SingleGenerationRequest, flood(b"\x1a\0")),
    "model ids": (pb.ModelInfoRequest, flood(b"\x0a\0")),
    "unknown numbers": (pb.BatchedGenerationRequest, flood(b"\xf8\x01\x01")),
    "overlong numbers": (pb.BatchedGenerationRequest, flood(b"\xf8\x01\x81\x80\x80\x80\0")),
    "groups": (pb.BatchedGenerationRequest, flood(b"\x33\x34")),
    "stop sequences": (pb.BatchedGenerationRequest, pb.BatchedGenerationRequest(params=STOPS).SerializeToString()),
    "choices": (pb.BatchedGenerationRequest, pb.BatchedGenerationRequest(params=CHOICES).SerializeToString()),
}


@pytest.mark.parametrize(("kind", "data"), FLOODS.values(), ids=FLOODS)
def test_floods_of_fields(kind: type[Message], data: bytes) -> None:
    with pytest.raises(InvalidRequest, match="the message has more than 3072 fields, which is enough for 512 inputs"):
        parse(data, kind, 512)


@pytest.mark.parametrize("data", [b"\xff" * HALF_A_MESSAGE, b"\x0a\xff\xff\xff\xff\x0f" * 400, b"\x12\x80" * 999])
def test_bytes_that_are_no_message(data: bytes) -> None:
    with pytest.raises(InvalidRequest, match=r"^the message cannot be decoded$"):
        parse(data, pb.BatchedTokenizeRequest, 512)
