"""Compares the server's answers with the oracle's, and sends requests in every mode."""

import itertools
import math
import random
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import regex
from golden_protocol import join_stream, violations
from oracle import NEAR_TIE, TOLERANCE, Answer, OracleToken

from tgis.pb import generation_pb2 as pb
from tgis.pb import generation_pb2_grpc as pb_grpc

TEXT_ONLY = pb.ResponseOptions()
OUTPUT_TOKENS = pb.ResponseOptions(generated_tokens=True)
INPUT_TOKENS = pb.ResponseOptions(input_tokens=True, token_logprobs=True)
EVERYTHING = pb.ResponseOptions(
    input_tokens=True, generated_tokens=True, token_logprobs=True, token_ranks=True, top_n_tokens=5
)
OPTIONS = (TEXT_ONLY, OUTPUT_TOKENS, INPUT_TOKENS, EVERYTHING)
TIMEOUT = 120
TOKEN_TOLERANCE = 1e-4  # of chosen tokens; candidates, being less likely, get the oracle's tolerance


class Comparison:
    """One answer of the server beside the oracle's."""

    def __init__(self, answer: Answer, max_new_tokens: int, options: pb.ResponseOptions) -> None:
        self.answer, self.max_new_tokens, self.options = answer, max_new_tokens, options
        self.expected = answer.generated[:max_new_tokens]

    def check(self, got: pb.GenerationResponse) -> bool:
        """Compare; False if a near tie that the server decided otherwise ended the comparison early."""
        assert got.input_token_count == len(self.answer.input_tokens)
        assert got.seed == 0
        assert got.stop_sequence == ""
        self._check_inputs(got.input_tokens)
        agreed = self._num_matching_tokens(got)
        for token, place in zip(got.tokens[:agreed], self.expected, strict=False):
            self._check_token(token, place)
        if agreed < len(self.expected):
            assert got.text.startswith(self.answer.texts[agreed])
            return False
        assert got.text == self.answer.texts[agreed]
        assert got.generated_token_count == agreed
        assert pb.StopReason.Name(got.stop_reason) == self._stop_reason()
        return True

    def _stop_reason(self) -> str:
        whole, reason = len(self.answer.generated), self.answer.stop_reason
        if self.max_new_tokens > whole or (self.max_new_tokens == whole and reason == "EOS_TOKEN"):
            return reason
        return "MAX_TOKENS"

    def _num_matching_tokens(self, got: pb.GenerationResponse) -> int:
        """Tokens before the first near tie that the server decided otherwise."""
        if not self.options.generated_tokens:
            assert not got.tokens
            return self._num_matching_by_text(got.text)
        assert len(got.tokens) == got.generated_token_count
        for step, (token, place) in enumerate(zip(got.tokens, self.expected, strict=False)):
            if token.text != place.token:
                assert step in self.answer.near_tie_steps(), f"{token.text!r}, not {place.token!r}, at {step}"
                assert token.text in {text for text, logprob in place.top if logprob > place.top[0][1] - NEAR_TIE}
                return step
        assert len(got.tokens) == len(self.expected)
        return len(self.expected)

    def _num_matching_by_text(self, text: str) -> int:
        if text == self.answer.texts[len(self.expected)]:
            return len(self.expected)
        near_ties = {step for step in self.answer.near_tie_steps() if step < len(self.expected)}
        assert near_ties, f"{text!r}, not {self.answer.texts[len(self.expected)]!r}"
        return min(near_ties)

    def _check_inputs(self, tokens: Iterable[pb.TokenInfo]) -> None:
        if not self.options.input_tokens:
            assert not tokens
            return
        first, *rest = tokens
        assert [first.text, *(token.text for token in rest)] == self.answer.input_tokens
        predicted = rest[: len(self.answer.input_logprobs)]  # an encoder's tokens have none
        for token in (first, *rest[len(predicted) :]):
            assert math.isnan(token.logprob) == self.options.token_logprobs
            assert (token.rank, len(token.top_tokens)) == (0, 0)
        for token, place in zip(predicted, self.answer.input_logprobs, strict=True):
            self._check_token(token, place)

    def _check_token(self, token: pb.TokenInfo, place: OracleToken) -> None:
        assert token.text == place.token
        logprob = place.logprob if self.options.token_logprobs else 0
        assert abs(token.logprob - logprob) <= TOKEN_TOLERANCE, (token.text, token.logprob, logprob)
        best, worst = place.ranks if self.options.token_ranks else (0, 0)
        assert best <= token.rank <= worst, (token.text, token.rank, place.ranks)
        if self.options.top_n_tokens:
            _check_candidates(token, place, self.options.top_n_tokens)
        else:
            assert not token.top_tokens


def _check_candidates(token: pb.TokenInfo, place: OracleToken, count: int) -> None:
    """The top `count`, best first; candidates that differ by less than the tolerance may stand for each other."""
    wider, got = dict(place.top), {top.text: top.logprob for top in token.top_tokens}
    logprobs = list(got.values())
    assert logprobs == sorted(logprobs, reverse=True)
    assert len(got) == len(token.top_tokens) >= count
    assert set(logprobs[count:]) <= {logprobs[count - 1]}, "more than asked, without a tie"
    last = place.top[count - 1][1]
    assert {text for text, logprob in place.top if logprob > last + 2 * TOLERANCE} <= got.keys()
    for text, logprob in got.items():
        assert abs(logprob - wider[text]) <= TOLERANCE, (text, logprob, wider[text])


def _check_cuts(texts: list[str]) -> None:
    """No message starts inside a grapheme cluster."""
    begins = {0, *(match.end() for match in regex.finditer(r"\X", "".join(texts)))}
    assert begins.issuperset(itertools.accumulate(len(text) for text in texts))


def generate(
    stub: pb_grpc.GenerationServiceStub,
    answers: list[Answer],
    max_new_tokens: int,
    options: pb.ResponseOptions,
) -> list[pb.GenerationResponse]:
    """One unary call."""
    request = pb.BatchedGenerationRequest(
        requests=[pb.GenerationRequest(text=answer.prompt) for answer in answers],
        params=_parameters(max_new_tokens, options),
    )
    return list(stub.Generate(request, timeout=TIMEOUT).responses)


def stream(
    stub: pb_grpc.GenerationServiceStub, answer: Answer, max_new_tokens: int, options: pb.ResponseOptions
) -> pb.GenerationResponse:
    """One stream, merged into a response."""
    request = _single(answer, max_new_tokens, options)
    messages = list(stub.GenerateStream(request, timeout=TIMEOUT))
    assert violations(request, messages) == []
    _check_cuts([message.text for message in messages])
    return join_stream(messages)


def cancel_stream(stub: pb_grpc.GenerationServiceStub, answer: Answer, messages: int) -> None:
    """Open a stream and cancel it after this many messages."""
    call = stub.GenerateStream(_single(answer, 32, EVERYTHING), timeout=TIMEOUT)
    for _ in itertools.islice(call, messages):
        pass
    call.cancel()


def _single(answer: Answer, max_new_tokens: int, options: pb.ResponseOptions) -> pb.SingleGenerationRequest:
    return pb.SingleGenerationRequest(
        request=pb.GenerationRequest(text=answer.prompt), params=_parameters(max_new_tokens, options)
    )


def _parameters(max_new_tokens: int, options: pb.ResponseOptions) -> pb.Parameters:
    return pb.Parameters(stopping=pb.StoppingCriteria(max_new_tokens=max_new_tokens), response=options)


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """A request to send `delay` seconds after the first."""

    delay: float
    answer: Answer
    mode: str  # unary, stream or leave
    max_new_tokens: int
    options: pb.ResponseOptions

    def __str__(self) -> str:
        prompt, options = self.answer.prompt[:40], str(self.options).split()
        return f"{self.mode} at {self.delay:.2f} s of {prompt!r}, {self.max_new_tokens} tokens, {options}"

    def send_and_check(self, stub: pb_grpc.GenerationServiceStub, start: float) -> bool:
        """Send it and check the answer; whether all of it could be compared."""
        time.sleep(max(0.0, start + self.delay - time.monotonic()))
        if self.mode == "leave":
            cancel_stream(stub, self.answer, 3)
            return True
        if self.mode == "stream":
            got = stream(stub, self.answer, self.max_new_tokens, self.options)
        else:
            (got,) = generate(stub, [self.answer], self.max_new_tokens, self.options)
        return Comparison(self.answer, self.max_new_tokens, self.options).check(got)


def random_requests(
    answers: list[Answer], seed: int, seconds: float, max_new_tokens: tuple[int, int]
) -> list[ScheduledRequest]:
    """Forty requests at random times, and eight that are cancelled; every prompt at least once."""
    draw = random.Random(seed)
    chosen = [*answers, *draw.choices(answers, k=48)][:48]
    draw.shuffle(chosen)
    ways = ["leave"] * 8 + ["unary", "stream"] * 20
    return [
        ScheduledRequest(
            delay=draw.uniform(0, seconds),
            answer=answer,
            mode=way,
            max_new_tokens=draw.randint(*max_new_tokens),
            options=draw.choice(OPTIONS),
        )
        for answer, way in zip(chosen, ways, strict=True)
    ]


def send_all(stub: pb_grpc.GenerationServiceStub, arrivals: list[ScheduledRequest]) -> int:
    """Send all; how many comparisons a near tie ended early."""
    start = time.monotonic()
    with ThreadPoolExecutor(len(arrivals)) as pool:
        met = [pool.submit(arrival.send_and_check, stub, start) for arrival in arrivals]
    failures = [
        f"{arrival}: {error!r}" for arrival, future in zip(arrivals, met, strict=True) if (error := future.exception())
    ]
    assert not failures, "\n".join(failures)
    return sum(not future.result() for future in met)
