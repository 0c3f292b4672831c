"""Replies to Tokenize: every token and place, and at most as many bytes as allowed."""

import itertools
import math
from array import array

import pytest

from tgis.api.grpc import convert
from tgis.api.http.responses import best_first
from tgis.errors import InvalidRequest
from tgis.frontend.output import RequestOutput, TokenInfo
from tgis.frontend.tokenizer import Encoding
from tgis.pb import generation_pb2 as pb

TEXTS = ["", "a", "Ġfirst", "<0x0A>", "ü🦙" * 40, "x" * 127, "x" * 128, "\0"]


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
    limit = convert.tokenize_call(request, max_reply_bytes=12_000).max_tokens
    if not tokens and not offsets:
        assert limit is None
        return
    assert limit is not None
    one = pb.TokenizeResponse(tokens=["a"] * tokens, offsets=[{"start": 128, "end": 129}] * offsets).ByteSize()
    assert limit >= 12_000 // one  # what has room is not refused
    assert limit <= 12_000 // 3


def test_the_best_has_the_highest_mean_logprob() -> None:
    def output(index: int, *logprobs: float) -> RequestOutput:
        return RequestOutput(index, tokens=[TokenInfo(5, "a", logprob, 0, []) for logprob in logprobs])

    made = [output(0, -4.0), output(1, math.nan), output(2, -1.0, -2.0), output(3, -1.5), output(4), output(5, -3.0)]
    assert [one.index for one in best_first(made)] == [2, 3, 5, 0, 1, 4]
