"""A message with too many fields is refused before protobuf builds it; any other is parsed as protobuf does;
what clients of TGIS and vllm-tgis-adapter have on the wire.
"""

import random
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from google.protobuf import text_format
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.message import DecodeError, Message
from repository import REPOSITORY

from tgis.api.grpc.parsing import parse
from tgis.errors import InvalidRequest
from tgis.pb import generation_pb2 as pb

TEXTS = ["", "a", "The Queen", "\n", " ", "\0", "é👩🏾‍🚀", "e\u0301" * 40, "</s>", "a</s>b", "\ufffd\ufeff\u202e"]
LONG_TEXTS = ["x" * 300, "—" * 2000, "a b" * 20_000]
WHOLE = [0, 0, 1, 1, 2, 3, 5, 8, 20, 64, 65, 128, 2**31 - 1, 2**31, 2**32 - 1]
FLOATS = [0.0, 0.0, 1.0, 1.0, 0.5, 0.05, 0.9, 1.5, 10.0, 1e-9, -1.0, 1e38, -1e38, 1e-45]
ODD_FLOATS = [float("nan"), float("inf"), float("-inf")]
_VALUES: dict[int, Callable[[random.Random], object]] = {
    FieldDescriptor.TYPE_STRING: lambda draw: draw.choice(TEXTS if draw.random() < 0.95 else LONG_TEXTS),
    FieldDescriptor.TYPE_BOOL: lambda draw: draw.random() < 0.5,
    FieldDescriptor.TYPE_UINT32: lambda draw: draw.choice(WHOLE),
    FieldDescriptor.TYPE_UINT64: lambda draw: draw.choice([*WHOLE, 2**63, 2**64 - 1]),
    FieldDescriptor.TYPE_ENUM: lambda draw: draw.choice([0, 1, 1, 2, 77, -1]),
    FieldDescriptor.TYPE_FLOAT: lambda draw: draw.choice(FLOATS if draw.random() < 0.95 else ODD_FLOATS),
}


def random_message(kind: type[Message], draw: random.Random) -> Message:
    """A message with a random subset of its fields set."""
    message = kind()
    _fill(message, draw, density=draw.choice([0.1, 0.2, 0.6]))
    return message


def _fill(message: Message, draw: random.Random, density: float) -> None:
    for field in message.DESCRIPTOR.fields:
        inputs = field.name in ("requests", "request", "text")
        if draw.random() > (0.95 if inputs else density):
            continue
        if isinstance(field.default_value, list):  # repeated, in every version of protobuf
            for _ in range(draw.choice([0, 1, 1, 1, 2, 3, 7])):
                _append(message, field, draw, density)
        elif field.message_type:
            getattr(message, field.name).SetInParent()
            _fill(getattr(message, field.name), draw, density)
        else:
            setattr(message, field.name, _VALUES[field.type](draw))


def _append(message: Message, field: Any, draw: random.Random, density: float) -> None:
    if field.message_type and field.message_type.GetOptions().map_entry:
        key, value = (_VALUES[each.type](draw) for each in field.message_type.fields)
        getattr(message, field.name)[key] = value
    elif field.message_type:
        _fill(getattr(message, field.name).add(), draw, density)
    else:
        getattr(message, field.name).append(_VALUES[field.type](draw))


def mutated(data: bytes, draw: random.Random) -> bytes:
    """The bytes with a few replaced, deleted, duplicated or inserted."""
    changed = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        at = draw.randint(0, len(changed))
        end = at + draw.randint(0, 8)
        match draw.randrange(4):
            case 0:
                changed[at:end] = draw.randbytes(end - at)
            case 1:
                del changed[at:end]
            case 2:
                changed[at:at] = changed[at:end]
            case 3:
                changed[at:at] = draw.randbytes(end - at)
    return bytes(changed)


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
    most = b"\x12\0" * (2048 + 2 * 512)
    assert len(parse(most, pb.BatchedTokenizeRequest, 512).requests) == 3072
    with pytest.raises(InvalidRequest, match="more than 3072 fields") as caught:
        parse(most + b"\x12\0", pb.BatchedTokenizeRequest, 512)
    assert caught.value.field == "requests"
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


def test_every_field_value_and_method_is_as_it_always_was() -> None:
    file = FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(file)
    assert text_format.MessageToString(file) == (REPOSITORY / "tests/golden/generation.textproto").read_text()
