"""A real server of real models against the oracle: alone, streamed, in a batch, overlapping.

Where the oracle's two best tokens nearly tie and the server takes the other one, the comparison of that
request ends; each test prints how many did so.
"""

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
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
from oracle import MAX_NEW_TOKENS, PROMPTS, Answer

from tgis.pb import generation_pb2 as pb
from tgis.pb import generation_pb2_grpc as pb_grpc

pytestmark = pytest.mark.timeout(600)  # the first test may have to compute the oracle's answers

MODELS = pytest.mark.parametrize("served", PROMPTS, indirect=True)
CASES = [(model, prompt) for model, prompts in PROMPTS.items() for prompt in prompts]
SMALL = [(model, list(PROMPTS[model])) for model in ("glassllm", "detransliterator", "titles")]
BATCHES = [
    ("smollm2", "one_token long emoji chat_short python english joiners newlines"),
    *((model, " ".join(prompts[at : at + 8])) for model, prompts in SMALL for at in range(0, len(prompts), 8)),
]


@dataclass
class Served:
    """A server, a stub, and the oracle's answers of its model."""

    server: Server
    stub: pb_grpc.GenerationServiceStub
    answers: dict[str, Answer]
    max_new_tokens: int
    is_large: bool  # streamed together only


@pytest.fixture(scope="module")
def smollm2(request: pytest.FixtureRequest, smollm2_dir: Path, cache_dir: Path) -> Iterator[Served]:
    # by default its KV cache has 5 GiB, which take seconds to clear
    with _serving("smollm2", smollm2_dir, cache_dir, request, KV_CACHE_SIZE_MB=512) as served:
        yield served


@pytest.fixture(scope="module")
def glassllm(request: pytest.FixtureRequest, glassllm_dir: Path, cache_dir: Path) -> Iterator[Served]:
    with _serving("glassllm", glassllm_dir, cache_dir, request) as served:
        yield served


@pytest.fixture(scope="module")
def detransliterator(request: pytest.FixtureRequest, detransliterator_dir: Path, cache_dir: Path) -> Iterator[Served]:
    with _serving("detransliterator", detransliterator_dir, cache_dir, request) as served:
        yield served


@pytest.fixture(scope="module")
def titles(request: pytest.FixtureRequest, titles_dir: Path, cache_dir: Path) -> Iterator[Served]:
    with _serving("titles", titles_dir, cache_dir, request) as served:
        yield served


@contextmanager
def _serving(name: str, model: Path, cache: Path, request: pytest.FixtureRequest, **options: Any) -> Iterator[Served]:
    answers = oracle.answers(name, model, cache, request.config.getoption("--oracle-recompute"))
    with (
        TemporaryDirectory() as log,
        running_server(Path(log), model, DTYPE="float32", **options) as server,
        server.stub() as stub,
    ):
        yield Served(server, stub, answers, MAX_NEW_TOKENS[name], name == "smollm2")


@pytest.fixture
def served(request: pytest.FixtureRequest) -> Served:
    one: Served = request.getfixturevalue(request.param)
    return one


@pytest.fixture(autouse=True)
def _log_of_failures(request: pytest.FixtureRequest, served: Served) -> Iterator[None]:
    before = request.session.testsfailed
    yield
    if request.session.testsfailed > before:
        print(served.server.log.read_text()[-10_000:])


@pytest.mark.parametrize(("served", "prompt"), CASES, indirect=["served"])
def test_alone(served: Served, prompt: str) -> None:
    answer, most = served.answers[prompt], served.max_new_tokens
    (unary,) = generate(served.stub, [answer], most, EVERYTHING)
    compared = [Comparison(answer, most, EVERYTHING).check(unary)]
    if not served.is_large:
        streamed = stream(served.stub, answer, most, EVERYTHING)
        assert streamed.text == unary.text
        assert [token.text for token in streamed.tokens] == [token.text for token in unary.tokens]
        compared.append(Comparison(answer, most, EVERYTHING).check(streamed))
        compared.append(Comparison(answer, most, TEXT_ONLY).check(stream(served.stub, answer, most, TEXT_ONLY)))
    print(f"ended at a near tie: {compared.count(False)} of {len(compared)}")


@MODELS
def test_streams_together(served: Served) -> None:
    options = itertools.cycle(OPTIONS)
    arrivals = [
        ScheduledRequest(0, answer, "stream", served.max_new_tokens, next(options))
        for answer in served.answers.values()
    ]
    print(f"ended at a near tie: {send_all(served.stub, arrivals)} of {len(arrivals)}")


@pytest.mark.parametrize(
    ("served", "prompts"), BATCHES, indirect=["served"], ids=[f"{b[0]}-{b[1].split()[0]}" for b in BATCHES]
)
def test_batch_call(served: Served, prompts: str) -> None:
    answers = [served.answers[prompt] for prompt in prompts.split()]
    responses = generate(served.stub, answers, 24, EVERYTHING)
    compared = [
        Comparison(answer, 24, EVERYTHING).check(response) for answer, response in zip(answers, responses, strict=True)
    ]
    print(f"ended at a near tie: {compared.count(False)} of {len(compared)}")


@pytest.mark.parametrize(
    ("served", "seconds", "max_new_tokens", "seed"),
    [
        ("smollm2", 3, (24, 64), 1),
        ("glassllm", 0, (1, 32), 2),
        ("glassllm", 2, (8, 32), 4),
        ("detransliterator", 1, (1, 48), 6),
        ("titles", 0.5, (1, 24), 7),
    ],
    indirect=["served"],
)
def test_overlapping(served: Served, seconds: float, max_new_tokens: tuple[int, int], seed: int) -> None:
    arrivals = random_requests(list(served.answers.values()), seed, seconds, max_new_tokens)
    print(f"ended at a near tie: {send_all(served.stub, arrivals)} of {len(arrivals)}")


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("millis", "least"), [(1, 1), (200, 2)])
@pytest.mark.parametrize("served", ["smollm2"], indirect=True)
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
