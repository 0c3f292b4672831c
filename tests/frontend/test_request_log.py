"""tgis.frontend.request_log: one line per input, however it ends, and no text unless requested."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from harness import Server, as_stream_request, running_server, unary_request, wait_until

from demo.fake_model import make_fake_model
from tgis.pb import generation_pb2 as pb
from tgis.pb.generation_pb2_grpc import GenerationServiceStub as Stub

SECRET = "my-password-is-swordfish and it is long"


def start(directory: Path, **options: object) -> Any:
    model = make_fake_model(directory / "model", step_seconds=0.01, poison_token=0)
    settings: dict[str, Any] = {"DEPLOYMENT_FRAMEWORK": "fake", "JSON_OUTPUT": "true"}
    return running_server(directory, model, **(settings | options))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with start(tmp_path_factory.mktemp("logs")) as running:
        yield running


@pytest.fixture(scope="module")
def stub(server: Server) -> Iterator[Stub]:
    with server.stub() as stub:
        yield stub


def lines(server: Server, correlation_id: str, count: int) -> list[dict[str, Any]]:
    """Wait for so many log lines with the correlation id."""

    def found() -> list[dict[str, Any]]:
        logged = [json.loads(line) for line in server.log.read_text().splitlines() if line.startswith("{")]
        return [line for line in logged if line.get("correlation_id") == correlation_id]

    wait_until(lambda: len(found()) >= count, "lines in the log", 5)
    return found()


def metadata(correlation_id: str) -> list[tuple[str, str]]:
    return [("x-correlation-id", correlation_id), ("authorization", "Bearer sesame")]


def test_each_input_has_one_line(server: Server, stub: Stub) -> None:
    request = pb.BatchedGenerationRequest(requests=[pb.GenerationRequest(text="abc"), pb.GenerationRequest(text="de")])
    request.params.stopping.max_new_tokens = 4
    stub.Generate(request, metadata=metadata("two-inputs"))
    found = lines(server, "two-inputs", 2)
    assert [(line["input_tokens"], line["generated_tokens"]) for line in found] == [(3, 4), (2, 4)]
    assert [line["request_id"] for line in found] == ["two-inputs-0", "two-inputs-1"]
    assert all("MAX_TOKENS" in line["message"] and line["level"] == "INFO" for line in found)
    assert all("max_new_tokens=4" in line["parameters"] for line in found)
    assert [line["message"] for line in found] == [f"batch request {n} of 2: 4 tokens, MAX_TOKENS" for n in (1, 2)]
    for line in found:
        parts = [line[f"{name}_seconds"] for name in ("validation", "queue", "inference")]
        assert min(parts) >= 0
        assert sum(parts) <= line["total_seconds"] + 0.001
        assert line["inference_seconds"] >= 4 * 0.01
        assert line["seconds_per_token"] == pytest.approx(line["inference_seconds"] / 4, abs=1e-4)


def test_of_lists_of_tokens_only_the_lengths_are_logged(server: Server, stub: Stub) -> None:
    request = unary_request("abc", 4)
    request.params.stopping.stop_token_ids.extend([7, 8])
    request.params.decoding.bad_words.extend(["zy", "x"])
    request.params.decoding.allowed_token_ids.extend(range(5, 250))
    stub.Generate(request, metadata=metadata("lists"))
    (line,) = lines(server, "lists", 1)
    lengths = {"stop_token_ids=2", "allowed_token_ids=245", "bad_words=4", "max_new_tokens=4"}
    assert set(line["parameters"].split()) == lengths


def test_each_input_is_observed(server: Server, stub: Stub) -> None:
    names = [f"tgi_request_{name}" for name in ("raw_input_length", "input_length", "max_new_tokens", "total_tokens")]
    names = [f"{name}_{kind}" for name in names for kind in ("count", "sum")] + [
        "tgi_request_validation_duration_count"
    ]
    before = server.metrics(*names)
    request = pb.BatchedGenerationRequest(requests=[pb.GenerationRequest(text=text) for text in ("abc", "defghi")])
    request.params.stopping.max_new_tokens = 4
    request.params.truncate_input_tokens = 5
    stub.Generate(request, metadata=metadata("observed"))
    grown = [new - old for new, old in zip(server.metrics(*names), before, strict=True)]
    assert grown == [2, 3 + 6, 2, 3 + 5, 2, 4 + 4, 2, 7 + 9, 1]


def test_calls_to_tokenize_are_observed(server: Server, stub: Stub) -> None:
    names = [f"tgi_tokenize_request_{name}" for name in ("count", "input_count", "tokens_count", "tokens_sum")]
    names.append("tgi_tokenize_request_duration_count")
    before = server.metrics(*names)
    stub.Tokenize(pb.BatchedTokenizeRequest(requests=[pb.TokenizeRequest(text=text) for text in ("abc", "de")]))
    assert [new - old for new, old in zip(server.metrics(*names), before, strict=True)] == [1, 2, 1, 5, 1]


def test_the_correlation_id_is_in_the_trailing_metadata(server: Server, stub: Stub) -> None:
    _, done = stub.Generate.with_call(unary_request("abc", 3), metadata=metadata("unary-id"))
    assert ("x-correlation-id", "unary-id") in [tuple(entry) for entry in done.trailing_metadata()]
    stream = stub.GenerateStream(as_stream_request(unary_request("abc", 3)), metadata=metadata("stream-id"))
    list(stream)
    assert dict(stream.trailing_metadata())["x-correlation-id"] == "stream-id"
    with pytest.raises(grpc.RpcError) as caught:
        stub.Generate(unary_request("abc", 99999), metadata=metadata("failed-id"))
    error: Any = caught.value
    assert dict(error.trailing_metadata())["x-correlation-id"] == "failed-id"
    (line,) = lines(server, "failed-id", 1)
    assert "max_new_tokens must be <=" in line["message"]


def test_a_cancelled_stream_has_its_line_too(server: Server, stub: Stub) -> None:
    stream = stub.GenerateStream(as_stream_request(unary_request("abc", 500)), metadata=metadata("cancelled-id"))
    next(stream), next(stream)
    stream.cancel()
    (line,) = lines(server, "cancelled-id", 1)
    assert "CANCELLED" in line["message"]
    assert line["request_id"] == "cancelled-id"
    assert line["level"] == "INFO"  # nothing is wrong with the server


def test_a_cancelled_unary_call_says_how_many_tokens_were_generated(server: Server, stub: Stub) -> None:
    first_tokens = "tgi_request_time_to_first_token_duration_count"
    before = server.metric(first_tokens)
    call = stub.Generate.future(unary_request("abc", 500), metadata=metadata("impatient-id"))
    while server.metric(first_tokens) == before:
        pass
    call.cancel()
    (line,) = lines(server, "impatient-id", 1)
    assert 1 <= line["generated_tokens"] < 500
    assert line["message"] == f"single request: {line['generated_tokens']} tokens, CANCELLED"


def test_a_failed_call_is_an_error(server: Server, stub: Stub) -> None:
    with pytest.raises(grpc.RpcError):
        stub.Generate(unary_request("!", 5), metadata=metadata("poisoned-id"))  # "!" is token 0
    found = lines(server, "poisoned-id", 2)
    assert [line["level"] for line in found] == ["ERROR", "ERROR"]
    assert found[1]["message"] == "single request: 0 tokens, ERROR"


def test_a_grammar_that_cannot_be_followed_is_no_error_of_the_server(server: Server, stub: Stub) -> None:
    request = unary_request("ab", 500)
    pairs = " | ".join(f"{a} {b}" for a in "vwxyz" for b in "vwxyz")
    rules = [f"{name} ::= {pairs} | [ab]" for name in "vwxyz"]
    request.params.decoding.grammar = "\n".join(["root ::= x", *rules])  # more ambiguous with each token
    with pytest.raises(grpc.RpcError, match="the grammar cannot be followed"):
        stub.Generate(request, metadata=metadata("ambiguous-id"))
    failed, ended = lines(server, "ambiguous-id", 2)
    assert (failed["level"], failed["message"]) == ("INFO", "single call failed: the grammar cannot be followed")
    assert ended["level"] == "INFO"
    assert ended["message"].endswith("tokens, ERROR")


def test_a_refused_call_is_no_error_of_the_server(server: Server, stub: Stub) -> None:
    too_many = pb.BatchedGenerationRequest(requests=[pb.GenerationRequest(text="a")] * 513)
    with pytest.raises(grpc.RpcError):
        stub.Generate(too_many, metadata=metadata("refused-id"))
    (line,) = lines(server, "refused-id", 1)
    assert (line["level"], line["message"].split(":")[:2]) == (
        "INFO",
        ["batch call failed", " requests has 513 inputs, at most 512 allowed"],
    )


def test_no_text_and_no_credentials_are_logged(server: Server, stub: Stub) -> None:
    stub.Generate(unary_request(SECRET, 60, stop_sequences=["zzz"]), metadata=metadata("secret-id"))
    lines(server, "secret-id", 1)
    log = server.log.read_text()
    assert "swordfish" not in log
    assert "zzz" not in log
    assert "sesame" not in log


def test_truncated_text_is_logged_with_log_text(tmp_path: Path) -> None:
    with start(tmp_path, LOG_TEXT="true") as server:
        with server.stub() as stub:
            stub.Generate(unary_request(SECRET, 60), metadata=metadata("open-id"))
        (line,) = lines(server, "open-id", 1)
    assert line["input"] == SECRET[:32]
    assert line["output"] == SECRET[:32]
