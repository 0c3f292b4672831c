"""The gRPC API with generated stubs: a server in this process with the fake engine, which repeats its prompt."""

import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from grpc_calls import CONFIG
from harness import as_stream_request, unary_request
from local_server import LocalServer, local_server

from tgis.api.grpc.servicer import GenerationServicer
from tgis.pb import generation_pb2 as pb
from tgis.pb import generation_pb2_grpc as pb_grpc

Stub = pb_grpc.GenerationServiceStub
MAX_LENGTH, MAX_NEW = 200, 169


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    steps = {"max_sequence_length": MAX_LENGTH, "step_seconds": 0.01}
    with local_server(tmp_path_factory.mktemp("service"), steps, MAX_NEW_TOKENS=MAX_NEW) as running:
        yield running


@pytest.fixture
def stub(server: LocalServer) -> Iterator[Stub]:
    with server.stub() as made:
        yield made


def test_ids_of_tokens_if_asked_for(stub: Stub) -> None:
    """The fake model's ids are bytes in the order of GPT-2's characters for them, of which `!` is the first."""
    request = unary_request('"#</s>', 3)
    request.params.response.CopyFrom(pb.ResponseOptions(generated_tokens=True, input_tokens=True, top_n_tokens=1))
    (without,) = stub.Generate(request).responses
    request.params.response.token_ids = True
    (whole,) = stub.Generate(request).responses
    expected = [('"', 1, False), ("#", 2, False), ("</s>", 256, True)]
    for tokens in (whole.input_tokens, whole.tokens):
        assert [(token.text, token.id, token.special) for token in tokens] == expected
        assert [(top.text, top.id, top.special) for token in tokens for top in token.top_tokens] == expected
    _, second, *rest = stub.GenerateStream(as_stream_request(request))
    assert list(second.input_tokens) == list(whole.input_tokens)
    assert [token for message in rest for token in message.tokens] == list(whole.tokens)
    assert len(stub.Tokenize(pb.BatchedTokenizeRequest(requests=[{"text": "a"}] * 3000)).responses) == 3000
    for token in (*whole.input_tokens, *whole.tokens):  # an old client gets the bytes that it has always got
        for named in (token, *token.top_tokens):
            named.ClearField("id")
            named.ClearField("special")
    assert whole.SerializeToString() == without.SerializeToString()


@pytest.mark.parametrize("milliseconds", [200, 1])
def test_the_time_limit_cuts_with_partial_text(stub: Stub, milliseconds: int) -> None:
    request = unary_request("abcdefgh", MAX_NEW, min_new_tokens=MAX_NEW, time_limit_millis=milliseconds)
    *_, streamed = stub.GenerateStream(as_stream_request(request))
    for last in (streamed, *stub.Generate(request).responses):
        assert last.stop_reason == pb.TIME_LIMIT
        assert last.generated_token_count <= (1 if milliseconds == 1 else 60)


@pytest.mark.parametrize("remaining", [None, 5.0])
@pytest.mark.parametrize("partial", [False, True])
def test_an_answer_has_a_deadline_if_the_client_has_one(partial: bool, remaining: float | None) -> None:
    config = replace(CONFIG, deadline_partial=partial)
    context: Any = SimpleNamespace(time_remaining=lambda: remaining)
    unused: Any = None
    before = time.monotonic()
    deadline = GenerationServicer(unused, config, unused)._answer_deadline(context)
    assert (deadline is not None) == (partial and remaining is not None)
    assert deadline is None or before + 5 <= deadline <= time.monotonic() + 5
