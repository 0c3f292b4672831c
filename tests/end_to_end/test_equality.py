"""A real server of real models against the oracle: in batches and overlapping, unary and streamed.

Where the oracle's two best tokens nearly tie and the server takes the other one, the comparison of that
request ends; each test prints how many did so.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import oracle
import pytest
from equality import EVERYTHING, Comparison, generate, random_requests, send_all
from harness import Server, running_server
from oracle import MAX_NEW_TOKENS, Answer

pytestmark = pytest.mark.timeout(600)  # the first test may have to compute the oracle's answers

MODELS = ["glassllm", "detransliterator", pytest.param("smollm2", marks=pytest.mark.slow)]  # golden cases are of all


@dataclass
class Served:
    """A server, and the oracle's answers of its model."""

    server: Server
    answers: list[Answer]
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
    with running_server(tmp_path_factory.mktemp(name), model, **options) as server:
        yield Served(server, list(answers.values()), MAX_NEW_TOKENS[name])


@pytest.fixture(autouse=True)
def _log_of_failures(request: pytest.FixtureRequest, served: Served) -> Iterator[None]:
    before = request.session.testsfailed
    yield
    if request.session.testsfailed > before:
        print(served.server.log.read_text()[-10_000:])


def test_batch_calls(served: Served) -> None:
    met = []
    with served.server.stub() as stub:
        for at in range(0, len(served.answers), 8):
            batch = served.answers[at : at + 8]
            responses = generate(stub, batch, 24, EVERYTHING)
            met += [Comparison(answer, 24, EVERYTHING).check(got) for answer, got in zip(batch, responses, strict=True)]
    print(f"ended at a near tie: {met.count(False)} of {len(met)}")


def test_overlapping(served: Served) -> None:
    arrivals = random_requests(served.answers, seed=1, seconds=2, max_new_tokens=(1, served.max_new_tokens))
    with served.server.stub() as stub:
        print(f"ended at a near tie: {send_all(stub, arrivals)} of {len(arrivals)}")
