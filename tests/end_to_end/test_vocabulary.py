"""A tokenizer with more tokens than its model, such as one with an added [PAD]."""

from collections.abc import Iterator

import grpc
import pytest
from harness import Server, as_stream_request, failure, running_server, unary_request
from tokenizers import Tokenizer

from demo.fake_model import make_fake_model
from tgis.pb import generation_pb2 as pb

TOO_MANY = "gives token id 257, the model has only those below 257"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("model")
    path = make_fake_model(directory) / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens(["[PAD]"])
    tokenizer.save(str(path))
    with running_server(directory, directory, DEPLOYMENT_FRAMEWORK="fake") as running:
        yield running


@pytest.mark.parametrize("text", ["a[PAD]", "[PAD]", "[PAD]" + "a" * 100])
def test_an_input_with_a_token_beyond_the_embedding_is_refused(server: Server, text: str) -> None:
    """Before, its step failed, and with it those of the inputs beside it."""
    request = unary_request(text)
    with server.stub() as stub:
        refused = grpc.StatusCode.INVALID_ARGUMENT
        assert failure(lambda: stub.Generate(request)) == (refused, f"requests[0].text {TOO_MANY}")
        stream = stub.GenerateStream(as_stream_request(request))
        assert failure(lambda: list(stream)) == (refused, f"request.text {TOO_MANY}")
        (tokens,) = stub.Tokenize(pb.BatchedTokenizeRequest(requests=[pb.TokenizeRequest(text=text)])).responses
        assert tokens.token_count == len(text.replace("[PAD]", "P"))
        (response,) = stub.Generate(unary_request("hello", 3)).responses
        assert response.generated_token_count == 3
    assert "a step of" not in server.log.read_text()


def test_the_start_warns_of_such_a_tokenizer(server: Server) -> None:
    said = "the tokenizer has token '[PAD]' with id 257, the model has only ids below 257: inputs with it are refused"
    assert said in server.log.read_text()
