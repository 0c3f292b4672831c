"""Replies are written by hand; the same ones built by protobuf are the oracle, byte for byte."""

import random
from typing import Any

import pytest
from harness import run_async
from tgis.frontend.budget import Account, MemoryBudget
from tgis.utils.slices import Slicer

from tgis.api.grpc import convert
from tgis.errors import InvalidRequest
from tgis.frontend.generation import TokenizeResult
from tgis.frontend.output import RequestOutput, TokenInfo
from tgis.ipc.request import StopReason
from tgis.pb import generation_pb2 as pb

TEXTS = ["", "a", "Ġfirst", "<0x0A>", "ü🦙" * 40, "x" * 127, "x" * 128, "\0"]
LOGPROBS = [0.0, -0.0, -1.5, float("nan"), float("-inf"), -1e-45, -3.4e38]
COUNTS = [0, 1, 127, 128, 2**31, 2**32 - 1]
SEEDS = [0, 1, 2**63, 2**64 - 1]
IDS = [0, 1, 300, 128_255]


def is_special(id_: int) -> bool:
    return id_ in (0, 128_255)


def token(draw: random.Random) -> TokenInfo:
    tops = [(draw.choice(IDS), draw.choice(TEXTS), draw.choice(LOGPROBS)) for _ in range(draw.randrange(4))]
    return TokenInfo(draw.choice(IDS), draw.choice(TEXTS), draw.choice(LOGPROBS), draw.choice(COUNTS), tops)


def output(draw: random.Random) -> RequestOutput:
    made = RequestOutput(text=draw.choice(TEXTS), generated_token_count=draw.choice(COUNTS))
    made.tokens = [token(draw) for _ in range(draw.choice((0, 0, 1, 5)))]
    if draw.random() < 0.5:
        made.input_token_count, made.seed = draw.choice(COUNTS), draw.choice(SEEDS)
        made.stop_reason, made.stop_sequence = draw.choice(list(StopReason)), draw.choice(TEXTS)
        made.input_tokens = [token(draw) for _ in range(draw.choice((0, 1, 40)))]
    return made


def token_message(info: TokenInfo, *, ids: bool) -> pb.TokenInfo:
    def fields(id_: int, text: str, logprob: float) -> dict[str, Any]:
        known = {"id": id_, "special": is_special(id_)} if ids else {}
        return {"text": text, "logprob": logprob, **known}

    tops = [fields(*top) for top in info.top_tokens]
    return pb.TokenInfo(**fields(info.id, info.text, info.logprob), rank=info.rank, top_tokens=tops)


def message(made: RequestOutput, *, ids: bool) -> pb.GenerationResponse:
    return pb.GenerationResponse(
        text=made.text,
        generated_token_count=made.generated_token_count,
        input_token_count=made.input_token_count,
        stop_reason=pb.StopReason.Name(made.stop_reason),
        stop_sequence=made.stop_sequence,
        seed=made.seed,
        tokens=[token_message(info, ids=ids) for info in made.tokens],
        input_tokens=[token_message(info, ids=ids) for info in made.input_tokens],
    )


def canonical(message_type: Any, data: bytes) -> bytes:
    """The order of fields is free; what protobuf does not know would stay, and differ."""
    parsed = message_type.FromString(data)
    assert parsed.ByteSize() == len(data)  # nothing twice, no default
    serialized: bytes = parsed.SerializeToString(deterministic=True)
    return serialized


@pytest.mark.parametrize("ids", [False, True])
@run_async
async def test_generated_texts(ids: bool) -> None:
    draw, slicer = random.Random(int(ids)), Slicer()
    outputs = [output(draw) for _ in range(200)]
    special = is_special if ids else None
    for made in outputs:
        data = await convert.generation_response(made, slicer, special)
        assert canonical(pb.GenerationResponse, data) == message(made, ids=ids).SerializeToString()
    whole = pb.BatchedGenerationResponse(responses=[message(made, ids=ids) for made in outputs])
    data = await convert.generate_reply(outputs, slicer, special)
    assert canonical(pb.BatchedGenerationResponse, data) == whole.SerializeToString()


@run_async
async def test_tokenized_texts() -> None:
    spans = [(0, 0), (0, 1), (127, 128), (4_000_000, 2**32 - 1)]
    results, expected = [], []
    for count, tokens, offsets in [(0, [], []), (7, TEXTS, []), (300, [], spans), (8, TEXTS, spans * 500)]:
        results.append(TokenizeResult(count, [], tokens, offsets))
        placed = [{"start": start, "end": end} for start, end in offsets]
        expected.append(pb.TokenizeResponse(token_count=count, tokens=tokens, offsets=placed))
    data = await convert.tokenize_reply(results, Slicer(), 1 << 20)
    whole = pb.BatchedTokenizeResponse(responses=expected)
    assert canonical(pb.BatchedTokenizeResponse, data) == whole.SerializeToString()


@run_async
async def test_a_reply_about_too_much_text_is_refused_before_the_rest_of_it_is_made() -> None:
    tokens = iter(["12345678"] * 10_000)  # each has ten bytes on the wire
    with pytest.raises(InvalidRequest, match="the reply has more than 20000 bytes"):
        await convert.tokenize_reply([TokenizeResult(10_000, [], tokens, [])], Slicer(), 20_000)
    assert len(list(tokens)) > 7000


@pytest.mark.parametrize(("tokens", "offsets"), [(True, False), (False, True), (True, True), (False, False)])
@pytest.mark.parametrize("start", [0, 1, 127, 128, 20_000, 3_000_000])
def test_what_a_token_takes_at_least(tokens: bool, offsets: bool, start: int) -> None:
    request = pb.BatchedTokenizeRequest(return_tokens=tokens, return_offsets=offsets)
    limit = convert.tokenize_call(request, 0, Account(MemoryBudget(0, 0), b""), max_reply_bytes=1200).reply
    assert limit is not None
    spans = [(start, start, ""), (start, start + 1, ""), (start + 200, start + 200, ""), (start, 2**31, "a")]
    messages = [
        pb.TokenizeResponse(tokens=[text] * tokens, offsets=[{"start": first, "end": end}] * offsets)
        for first, end, text in spans
    ]
    sizes = [message.ByteSize() for message in messages]
    assert limit.token_bytes(start) == sizes[0] == min(sizes)
