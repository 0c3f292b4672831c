"""An engine that gives each sequence several tokens per step, through a real server: clients see no difference."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from harness import Server, as_stream_request, running_server, unary_request

from demo.fake_model import make_fake_model
from tgis.pb import generation_pb2 as pb
from tgis.pb import generation_pb2_grpc as pb_grpc

Stub = pb_grpc.GenerationServiceStub
DETAILS = pb.ResponseOptions(generated_tokens=True, token_logprobs=True)


@pytest.fixture(scope="module")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Stub]]:
    """Stubs of a server whose engine gives one token per step, and of one whose engine gives four."""
    with (
        server(tmp_path_factory.mktemp("one"), 1) as one,
        server(tmp_path_factory.mktemp("four"), 4) as four,
        one.stub() as one_stub,
        four.stub() as four_stub,
    ):
        yield [one_stub, four_stub]


def server(directory: Path, tokens_per_step: int) -> AbstractContextManager[Server]:
    model = make_fake_model(directory / "model", block_size=4, tokens_per_step=tokens_per_step)
    return running_server(directory, model, DEPLOYMENT_FRAMEWORK="fake")


@pytest.mark.parametrize(
    ("max_new_tokens", "stopping", "reason"),
    [
        (10, {}, pb.MAX_TOKENS),
        (30, {"stop_sequences": ["fox"]}, pb.STOP_SEQUENCE),
        (30, {"stop_sequences": ["qu"], "min_new_tokens": 7}, pb.STOP_SEQUENCE),
    ],
)
def test_replies_are_those_of_one_token_per_step(
    stubs: list[Stub], max_new_tokens: int, stopping: dict[str, object], reason: int
) -> None:
    request = unary_request("the quick fox ", max_new_tokens, **stopping)
    request.params.response.CopyFrom(DETAILS)
    one, four = (stub.Generate(request, timeout=20) for stub in stubs)
    assert four == one
    assert one.responses[0].stop_reason == reason
    stream, of_four = ([*stub.GenerateStream(as_stream_request(request), timeout=20)] for stub in stubs)
    assert of_four == stream
