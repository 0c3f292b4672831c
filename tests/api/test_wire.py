"""A message with too many fields is refused before protobuf builds it; any other is parsed as protobuf does."""

import asyncio
import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any, TypeVar

import pytest
from fuzz_messages import mutated, random_message
from google.protobuf.message import DecodeError, Message
from harness import run_async
from tgis.utils.slices import Slicer

from tgis.api.grpc import wire
from tgis.api.grpc.convert import raw_params
from tgis.errors import InvalidRequest
from tgis.frontend.sampling_params import RawParams
from tgis.pb import generation_pb2 as pb

T = TypeVar("T")

KINDS = [pb.BatchedGenerationRequest, pb.SingleGenerationRequest, pb.BatchedTokenizeRequest, pb.ModelInfoRequest]
HALF_A_MESSAGE = 2 << 20  # two-byte fields of the largest message


class CountedBytes(bytes):
    """Counts how many single bytes are read."""

    reads = 0

    def __getitem__(self, at: object) -> int:  # type: ignore[override]
        self.reads += 1
        return super().__getitem__(at)  # type: ignore[call-overload,no-any-return]


def parsed(parse: Callable[[], T]) -> T | None:
    try:
        return parse()
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
            assert str(parsed(lambda: wire.parse(padded, kind, 40))) == str(expected)  # noqa: B023


@pytest.mark.parametrize("kind", [pb.BatchedGenerationRequest, pb.BatchedTokenizeRequest])
def test_as_many_inputs_as_allowed(kind: type[Message]) -> None:
    texts = [pb.GenerationRequest(text="some text " * 20)] * 512
    whole = pb.BatchedGenerationRequest(requests=texts, params=pb.Parameters(truncate_input_tokens=3))
    sent = whole if kind is pb.BatchedGenerationRequest else pb.BatchedTokenizeRequest(requests=[{"text": "t"}] * 512)
    assert wire.parse(sent.SerializeToString(), kind, 512) == sent


FLOODS = {
    "empty inputs": (pb.BatchedTokenizeRequest, b"\x12\0"),
    "inputs with empty texts": (pb.BatchedGenerationRequest, b"\x1a\x02\x12\0"),
    "parameters to merge": (pb.BatchedGenerationRequest, b"\x52\0"),
    "requests to merge": (pb.SingleGenerationRequest, b"\x1a\0"),
    "model ids": (pb.ModelInfoRequest, b"\x0a\0"),
    "unknown numbers": (pb.BatchedGenerationRequest, b"\xf8\x01\x01"),
    "overlong numbers": (pb.BatchedGenerationRequest, b"\xf8\x01\x81\x80\x80\x80\0"),
    "groups": (pb.BatchedGenerationRequest, b"\x33\x34"),
}


@pytest.mark.parametrize(("kind", "field"), FLOODS.values(), ids=FLOODS)
def test_floods_of_fields(kind: type[Message], field: bytes) -> None:
    data = CountedBytes(field * (HALF_A_MESSAGE // len(field)))
    with pytest.raises(InvalidRequest, match="the message has more than 2048 fields, which is enough for 512 inputs"):
        wire.parse(data, kind, 512)
    assert data.reads < 2049 * 20


def test_floods_inside_parameters() -> None:
    stops = pb.Parameters(stopping=pb.StoppingCriteria(stop_sequences=[""] * 100_000))
    choices = pb.Parameters(decoding=pb.DecodingParameters(choice={"choices": ["a"] * 100_000}))
    for params in (stops, choices):
        data = CountedBytes(pb.BatchedGenerationRequest(params=params).SerializeToString())
        with pytest.raises(InvalidRequest, match="more than 2048 fields"):
            wire.parse(data, pb.BatchedGenerationRequest, 512)
        assert data.reads < 2049 * 20


@pytest.mark.parametrize("data", [b"\xff" * HALF_A_MESSAGE, b"\x0a\xff\xff\xff\xff\x0f" * 400, b"\x12\x80" * 999])
def test_bytes_that_are_no_message(data: bytes) -> None:
    with pytest.raises(InvalidRequest, match=r"^the message cannot be decoded$"):
        wire.parse(CountedBytes(data), pb.BatchedTokenizeRequest, 512)


def test_counting_pauses() -> None:
    message = pb.BatchedTokenizeRequest(requests=[{"text": "t"}] * 5000).SerializeToString()
    data = CountedBytes(message)
    reads = [data.reads for _ in wire.check_fields(data, pb.BatchedTokenizeRequest, 10_000)]
    slices = [after - before for before, after in pairwise([0, *reads])]
    assert len(slices) == 5000 * 2 // wire.FIELDS_PER_SLICE
    assert max(slices) < 2.1 * min(slices)


@pytest.mark.parametrize("size", [0, 1, 127, 128, 70_000, 3_000_000])
def test_serialized_messages_become_fields(size: int) -> None:
    one = pb.TokenizeResponse(tokens=["x" * size])
    tag, data = wire.tags(pb.BatchedTokenizeResponse)["responses"], one.SerializeToString()
    field = [wire.message_header(tag, [data, data]), data, data]
    one.tokens.append(one.tokens[0])
    assert pb.BatchedTokenizeResponse.FromString(b"".join(field * 2)).responses[:] == [one, one]


def raw_request(message: pb.BatchedGenerationRequest) -> tuple[list[str], RawParams]:
    return [request.text for request in message.requests], raw_params(message.params)


@run_async
async def test_messages_that_share_an_object_have_nothing_of_each_other() -> None:
    """Ten times as many bytes as one object reads; some messages are too large for it, some are no message."""
    kind, draw = pb.BatchedGenerationRequest, random.Random(0)
    reader, slicer, found, expected = wire.Reader(kind), Slicer(), list[Any](), list[Any]()
    num_bytes = 0
    while num_bytes < 10 * wire._MAX_SHARED_BYTES:
        message: Any = random_message(kind, draw)
        if draw.random() < 0.01:
            message.requests.add(text="x" * draw.choice((wire._SMALL_BYTES - 100, wire._SMALL_BYTES + 1)))
        data = message.SerializeToString()
        if draw.random() < 0.2:
            data = mutated(data, draw)
        num_bytes += len(data)
        try:
            found.append(await reader.read(data, slicer, raw_request, max_inputs=64))
        except InvalidRequest:
            found.append(None)
        expected.append(parsed(lambda data=data: raw_request(kind.FromString(data))))  # type: ignore[misc]
    assert None in expected
    assert repr(found) == repr(expected)  # NaN equals NaN


@run_async
async def test_large_messages_are_decoded_and_converted_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that the system has to find makes either take 14 ms for 4 MiB."""
    iteration, work, decode = 0, [], wire.decode

    def convert(message: pb.BatchedTokenizeRequest) -> str:
        work.append(("convert", iteration))
        return message.requests[0].text[:1]

    def counted_decode(data: bytes, kind: type[pb.BatchedTokenizeRequest]) -> pb.BatchedTokenizeRequest:
        work.append(("decode", iteration))
        return decode(data, kind)

    monkeypatch.setattr(wire, "decode", counted_decode)
    reader, slicer = wire.Reader(pb.BatchedTokenizeRequest), Slicer()
    messages = [pb.BatchedTokenizeRequest(requests=[{"text": name * HALF_A_MESSAGE}]) for name in "abc"]
    reads = [asyncio.create_task(reader.read(m.SerializeToString(), slicer, convert, max_inputs=1)) for m in messages]
    while not all(read.done() for read in reads):
        await asyncio.sleep(0)
        iteration += 1
    assert [read.result() for read in reads] == ["a", "b", "c"]
    assert sorted(name for name, _ in work) == ["convert"] * 3 + ["decode"] * 3
    assert len({at for _, at in work}) == 6
