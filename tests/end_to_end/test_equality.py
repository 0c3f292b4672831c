"""A real server of real models against the oracle: alone, streamed, in a batch, overlapping.

Where the oracle's two best tokens nearly tie and the server takes the other one, the comparison of that
request ends; each test prints how many did so.
"""

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import oracle
import pytest
from equality import (
    EVERYTHING,
    OPTIONS,
    TEXT_ONLY,
    Comparison,
    ScheduledRequest,
    generate,
    random_requests,
    send_all,
    stream,
)
from golden_protocol import join_stream
from harness import Server, as_stream_request, running_server, unary_request
from oracle import MAX_NEW_TOKENS, Answer

from tgis.pb import generation_pb2 as pb
from tgis.pb import generation_pb2_grpc as pb_grpc

pytestmark = pytest.mark.timeout(600)  # the first test may have to compute the oracle's answers

SOME = ["one_token", "long", "emoji", "chat_short", "python", "english", "joiners", "newlines"]
MODELS = ["smollm2", "detransliterator"]  # the golden cases compare others


@dataclass
class Served:
    """A server, a stub, and the oracle's answers of its model."""

    model: str
    server: Server
    stub: pb_grpc.GenerationServiceStub
    answers: dict[str, Answer]
    max_new_tokens: int


@pytest.fixture(scope="module", params=MODELS)
def served(
    request: pytest.FixtureRequest, cache_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    name = request.param
    model: Path = request.getfixturevalue(f"{name}_dir")
    answers = oracle.answers(name, model, cache_dir, request.config.getoption("--oracle-recompute"))
    # by default the KV cache of smollm2 has 5 GiB, which take seconds to clear
    options: dict[str, Any] = {"DTYPE": "float32", "KV_CACHE_SIZE_MB": 512}
    with running_server(tmp_path_factory.mktemp(name), model, **options) as server, server.stub() as stub:
        yield Served(name, server, stub, answers, MAX_NEW_TOKENS[name])


@pytest.fixture(autouse=True)
def _log_of_failures(request: pytest.FixtureRequest, served: Served) -> Iterator[None]:
    before = request.session.testsfailed
    yield
    if request.session.testsfailed > before:
        print(served.server.log.read_text()[-10_000:])


def test_alone(served: Served) -> None:
    """Two prompts one after the other: unary, and streamed with and without tokens."""
    met = []
    for answer in list(served.answers.values())[:2]:
        (unary,) = generate(served.stub, [answer], 24, EVERYTHING)
        met.append(Comparison(answer, 24, EVERYTHING).check(unary))
        for options in (EVERYTHING, TEXT_ONLY):
            streamed = stream(served.stub, answer, 24, options)
            assert streamed.text == unary.text
            met.append(Comparison(answer, 24, options).check(streamed))
    print(f"ended at a near tie: {met.count(False)} of {len(met)}")


def test_streams_together(served: Served) -> None:
    options = itertools.cycle(OPTIONS)
    arrivals = [
        ScheduledRequest(0, answer, "stream", served.max_new_tokens, next(options))
        for answer in served.answers.values()
    ]
    print(f"ended at a near tie: {send_all(served.stub, arrivals)} of {len(arrivals)}")


def test_batch_calls(served: Served) -> None:
    answers = [served.answers[name] for name in (SOME if served.model == "smollm2" else served.answers)]
    met = []
    for at in range(0, len(answers), 8):
        batch = answers[at : at + 8]
        responses = generate(served.stub, batch, 24, EVERYTHING)
        met += [Comparison(answer, 24, EVERYTHING).check(got) for answer, got in zip(batch, responses, strict=True)]
    print(f"ended at a near tie: {met.count(False)} of {len(met)}")


@pytest.mark.parametrize(
    "served", [pytest.param("smollm2", marks=pytest.mark.slow), "detransliterator"], indirect=True, scope="module"
)
def test_overlapping(served: Served) -> None:
    arrivals = random_requests(list(served.answers.values()), seed=1, seconds=2, max_new_tokens=(1, 48))
    print(f"ended at a near tie: {send_all(served.stub, arrivals)} of {len(arrivals)}")


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("millis", "least"), [(1, 1), (200, 2)])
@pytest.mark.parametrize("served", ["smollm2"], indirect=True, scope="module")
def test_a_time_limit_ends_with_the_tokens_so_far(served: Served, millis: int, least: int, streamed: bool) -> None:
    """TGIS's case. Where two tokens take longer than 200 ms, the limit doubles until they fit."""
    answer, count = served.answers["python"], 0
    assert not answer.near_tie_steps()
    while count < least:
        assert millis < 60_000
        request = unary_request(answer.prompt, 169, min_new_tokens=169, time_limit_millis=millis)
        started = time.monotonic()
        if streamed:
            got = join_stream(list(served.stub.GenerateStream(as_stream_request(request), timeout=120)))
        else:
            (got,) = served.stub.Generate(request, timeout=120).responses
        assert time.monotonic() - started >= millis / 1000
        count, millis = got.generated_token_count, 2 * millis
        assert got.stop_reason == pb.TIME_LIMIT
        assert 1 <= count < len(answer.texts)
        assert got.text == answer.texts[count]
