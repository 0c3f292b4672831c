"""The requests of a soak, and their expected answers: those of the idle server."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from benchmarks.soak.requests import ServerLimits, stream_request
from tgis.bench.workload import WORDS
from tgis.pb import generation_pb2 as pb
from tgis.pb.generation_pb2_grpc import GenerationServiceStub

NEAR_TIE = 1e-3  # of log-probabilities; another order of summation in a larger batch may choose the other token
CASE_TIMEOUT_SECONDS = 60.0
_MIN_TOKENS, _MAX_TOKENS = 2, 128
_MAX_WORDS = 40
_ODD_WORDS = ("“é…”", "naïve", "—", "日本", "🎉", "\n", "3,000")  # some have characters of several tokens


@dataclass(frozen=True, slots=True)
class Answer:
    """The output of one input, complete or not."""

    text: str
    tokens: list[str]
    reason: int  # pb.StopReason; NOT_FINISHED if the client did not wait for the end
    texts: list[str] = field(default_factory=list)  # of a stream: texts[n] is the text sent by the time of n tokens
    text_without_stops: str = ""  # the text without stop sequences, as far as it is known


@dataclass(frozen=True, slots=True)
class Case:
    """Inputs with the same greedy parameters, and the answer to each of them alone."""

    texts: list[str]
    params: pb.Parameters
    answers: list[Answer]


def difference(expected: Answer, got: Answer) -> str:
    """What is wrong with an answer under load, or ''; a truncated answer must be a prefix.

    A time limit takes precedence over a stop sequence of the same token, which then stays in the text.
    """
    count = len(got.tokens)
    if got.tokens != expected.tokens[:count]:
        return f"tokens {got.tokens} instead of {expected.tokens[:count]}"
    if got.reason == pb.NOT_FINISHED:
        return _mismatch_unless(expected.text.startswith(got.text), got, expected.text)
    if got.reason == pb.TIME_LIMIT:
        fits = expected.text_without_stops.startswith(got.text) and got.text.startswith(expected.texts[count])
        return _mismatch_unless(fits, got, expected.text_without_stops)
    if (got.text, got.reason, count) != (expected.text, expected.reason, len(expected.tokens)):
        return f"{count} tokens, {got.reason}, {got.text!r} instead of {expected}"
    return ""


def _mismatch_unless(fits: bool, got: Answer, whole: str) -> str:
    return "" if fits else f"text {got.text!r} instead of a beginning of {whole!r}"


def assemble_answer(responses: Sequence[pb.GenerationResponse]) -> Answer:
    """Merge a unary response or the messages of a stream so far; ValueError if they violate the protocol."""
    if any(response.stop_reason for response in responses[:-1]):
        raise ValueError("messages after the end")
    text, texts = "", [""]
    for response in responses:
        text += response.text
        new = response.generated_token_count - len(texts) + 1 if response.generated_token_count else 0
        if new != len(response.tokens):
            raise ValueError(f"{len(response.tokens)} tokens where the count says {new}")
        texts += [texts[-1]] * (new - 1) + [text] if new else []
    tokens = [token.text for response in responses for token in response.tokens]
    return Answer(text, tokens, responses[-1].stop_reason if responses else pb.NOT_FINISHED, texts)


async def make_cases(stub: GenerationServiceStub, bounds: ServerLimits, count: int, draw: random.Random) -> list[Case]:
    """Cases of all lengths, made one at a time so that the server is idle for each."""
    cases: list[Case] = []
    while len(cases) < count:
        inputs = draw.choice((1, 1, 1, 2, 4, 6))
        texts = [_random_text(draw, bounds) for _ in range(inputs)]
        if case := await _make_case(stub, texts, bounds, draw):
            cases.append(case)
    return cases


def _random_text(draw: random.Random, bounds: ServerLimits) -> str:
    words = [*WORDS, *_ODD_WORDS * 4]
    return " ".join(draw.choices(words, k=draw.randint(1, min(bounds.max_sequence_length // 6, _MAX_WORDS))))


async def _make_case(
    stub: GenerationServiceStub, texts: list[str], bounds: ServerLimits, draw: random.Random
) -> Case | None:
    """A case of these inputs; None if an output is too short or has a near tie too early."""
    params = _params(draw.randint(_MIN_TOKENS, min(bounds.max_new_tokens, _MAX_TOKENS)))
    probes = [await _stream_messages(stub, text, params) for text in texts]
    most = min(_num_certain_tokens(probe) for probe in probes)
    if most < _MIN_TOKENS:
        return None
    params.stopping.max_new_tokens = min(most, params.stopping.max_new_tokens)
    if draw.random() < 0.2 and (stop := _random_substring("".join(r.text for r in probes[0]), draw)):
        params.stopping.stop_sequences.append(stop)
    answers = [assemble_answer(await _stream_messages(stub, text, params)) for text in texts]
    whole = ["".join(message.text for message in probe) for probe in probes]
    answers = [replace(answer, text_without_stops=text) for answer, text in zip(answers, whole, strict=True)]
    return Case(texts, params, answers)


def _params(max_new_tokens: int) -> pb.Parameters:
    return pb.Parameters(
        stopping=pb.StoppingCriteria(max_new_tokens=max_new_tokens),
        response=pb.ResponseOptions(generated_tokens=True, token_logprobs=True, top_n_tokens=2),
    )


async def _stream_messages(
    stub: GenerationServiceStub, text: str, params: pb.Parameters
) -> list[pb.GenerationResponse]:
    stream = stub.GenerateStream(stream_request(text, params), timeout=CASE_TIMEOUT_SECONDS)
    return [response async for response in stream]


def _num_certain_tokens(responses: list[pb.GenerationResponse]) -> int:
    """The number of tokens before the first near tie."""
    tops = [token.top_tokens for response in responses for token in response.tokens]
    certain = (len(top) == 2 and top[0].logprob - top[1].logprob > NEAR_TIE for top in tops)
    return sum(accumulate(certain, min))


def _random_substring(text: str, draw: random.Random) -> str:
    start = draw.randint(len(text) // 2, max(len(text) - 2, 0)) if text else 0
    return text[start : start + 3]
