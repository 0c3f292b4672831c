"""Replies have every field of the values of the front end, and no other."""

import itertools
import math
import random
from array import array
from typing import Any

import pytest
from google.protobuf.message import Message

from tgis.api.clients import Account, Clients
from tgis.api.grpc import convert
from tgis.api.http.calls import best_first
from tgis.config import Config
from tgis.errors import InvalidRequest
from tgis.frontend.output import RequestOutput, TokenInfo
from tgis.frontend.tokenizer import Encoding
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


def serialized(message: Message) -> bytes:
    """NaN equals NaN here."""
    data: bytes = message.SerializeToString()
    return data


@pytest.mark.parametrize("ids", [False, True])
def test_generated_texts(ids: bool) -> None:
    draw = random.Random(int(ids))
    outputs = [output(draw) for _ in range(200)]
    special = is_special if ids else None
    for made in outputs:
        assert serialized(convert.fill_response(pb.GenerationResponse(), made, special)) == serialized(
            message(made, ids=ids)
        )
    whole = pb.BatchedGenerationResponse(responses=[message(made, ids=ids) for made in outputs])
    assert serialized(convert.generate_response(outputs, special)) == serialized(whole)


def test_tokenized_texts() -> None:
    spans = [(0, 0), (0, 1), (127, 128), (4_000_000, 2**32 - 1)]
    encodings, expected = [], []
    for count, tokens, offsets in [(0, [], []), (7, TEXTS, []), (300, [], spans), (8, TEXTS, spans * 500)]:
        ids, ends = (array("I", numbers) for numbers in (range(len(tokens)), itertools.chain(*offsets)))
        encodings.append(Encoding(ids, ends, count))
        placed = [{"start": start, "end": end} for start, end in offsets]
        expected.append(pb.TokenizeResponse(token_count=count, tokens=tokens, offsets=placed))
    whole = pb.BatchedTokenizeResponse(responses=expected).SerializeToString()
    assert convert.tokenize_response(encodings, TEXTS.__getitem__, len(whole)) == whole
    with pytest.raises(InvalidRequest, match=f"the reply has more than {len(whole) - 1} bytes"):
        convert.tokenize_response(encodings, TEXTS.__getitem__, len(whole) - 1)


@pytest.mark.parametrize(("tokens", "offsets"), [(True, False), (False, True), (True, True), (False, False)])
def test_tokens_that_a_reply_has_no_room_for_are_refused_before_it_is_made(tokens: bool, offsets: bool) -> None:
    request = pb.BatchedTokenizeRequest(return_tokens=tokens, return_offsets=offsets)
    account = Account(Clients(Config(model_name="m")), b"")
    limit = convert.tokenize_call(request, 0, account, max_reply_bytes=12_000).max_tokens
    if not tokens and not offsets:
        assert limit is None
        return
    assert limit is not None
    one = pb.TokenizeResponse(tokens=["a"] * tokens, offsets=[{"start": 1, "end": 2}] * offsets).ByteSize()
    assert limit >= 12_000 // one  # what has room is not refused
    assert limit <= 12_000 // 3


def test_the_best_has_the_highest_mean_logprob() -> None:
    def output(index: int, *logprobs: float) -> RequestOutput:
        return RequestOutput(index, tokens=[TokenInfo(5, "a", logprob, 0, []) for logprob in logprobs])

    made = [output(0, -4.0), output(1, math.nan), output(2, -1.0, -2.0), output(3, -1.5), output(4), output(5, -3.0)]
    assert [one.index for one in best_first(made)] == [2, 3, 5, 0, 1, 4]
