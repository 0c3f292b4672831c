"""tgis.frontend.request_log: one line per input, however it ends, and no text unless requested; what is observed."""

import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from engine_clients import outputs
from harness import as_stream_request, unary_request, wait_until
from local_server import LocalServer, local_server

from tgis.frontend.calls import CallKind, GenerateCall
from tgis.frontend.engine_output import RequestTimings
from tgis.frontend.params import Params
from tgis.frontend.request_log import log_output
from tgis.ipc.lookups import AdapterRef
from tgis.ipc.request import LogprobOptions, Request, StopReason
from tgis.pb import generation_pb2 as pb
from tgis.pb.generation_pb2_grpc import GenerationServiceStub as Stub
from tgis.utils import logs

SECRET = "my-password-is-swordfish and it is long"
STEPS = {"step_seconds": 0.01, "poison_token": 0}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    with local_server(tmp_path_factory.mktemp("logs"), STEPS, JSON_OUTPUT=True) as running:
        yield running


@pytest.fixture(scope="module")
def stub(server: LocalServer) -> Iterator[Stub]:
    with server.stub() as stub:
        yield stub


def lines(server: LocalServer, correlation_id: str, count: int = 1) -> list[dict[str, Any]]:
    """The log lines with the correlation id, once there are so many."""

    def matching() -> list[dict[str, Any]]:
        logged = [json.loads(line) for line in server.log.read_text().splitlines() if line.endswith("}")]
        return [line for line in logged if line.get("correlation_id") == correlation_id]

    wait_until(lambda: len(matching()) >= count, "lines in the log")
    return matching()


def metadata(correlation_id: str) -> list[tuple[str, str]]:
    return [("x-correlation-id", correlation_id), ("authorization", "Bearer sesame")]


def test_each_input_has_one_line_and_is_observed(server: LocalServer, stub: Stub) -> None:
    names = [f"tgi_request_{name}" for name in ("raw_input_length", "input_length", "max_new_tokens", "total_tokens")]
    names = [f"{name}_{kind}" for name in names for kind in ("count", "sum")]
    names.append("tgi_request_validation_duration_count")
    before = server.metrics(*names)
    request = pb.BatchedGenerationRequest(requests=[pb.GenerationRequest(text=text) for text in ("abc", "defghi")])
    request.params.stopping.max_new_tokens = 4
    request.params.truncate_input_tokens = 5
    stub.Generate(request, metadata=metadata("two-inputs"))
    entries = lines(server, "two-inputs", 2)
    assert [(line["input_tokens"], line["generated_tokens"]) for line in entries] == [(3, 4), (5, 4)]
    assert [line["request_id"] for line in entries] == ["two-inputs-0", "two-inputs-1"]
    assert [line["message"] for line in entries] == [f"batch request {n} of 2: 4 tokens, MAX_TOKENS" for n in (1, 2)]
    assert [(line["level"], line["parameters"]) for line in entries] == [("INFO", "max_new_tokens=4")] * 2
    grown = [new - old for new, old in zip(server.metrics(*names), before, strict=True)]
    assert grown == [2, 3 + 6, 2, 3 + 5, 2, 4 + 4, 2, 7 + 9, 1]


@pytest.mark.parametrize(
    ("scheduled", "seconds", "fill_context", "level"),
    [(3.0, (0.5, 2.0, 2.0), False, "WARNING"), (None, (3.5, 0.0, 0.0), True, "ERROR")],
)
def test_the_fields_of_a_line(
    scheduled: float | None, seconds: Any, fill_context: bool, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    now, options = time.monotonic(), LogprobOptions(input_tokens=True)
    adapter = AdapterRef("a", 1, 0, 7, 9)
    (_, output) = outputs([Request(n, [0, 5, 6], 3, logprob_options=options, adapter=adapter) for n in range(2)])
    output.params = Params(logprob_options=options, fill_context=fill_context)
    output.engine_output.timings = RequestTimings(now - 4, now - 3.5, now - scheduled if scheduled else 0, 0, now - 1)
    output.stop_reason, output.num_generated = StopReason.TOKEN_LIMIT, 1
    call = GenerateCall(CallKind.STREAM, ["x"], ["x"], Params(), n=2)
    with logs.correlation_scope("c"):
        log_output(call, output, "TOKEN_LIMIT", logging.ERROR, num_outputs=2, log_text=False)
    (record,) = caplog.records
    names = [f"{name}_seconds" for name in ("validation", "total", "queue", "inference")]
    found = [vars(record)[name] for name in (*names, "seconds_per_token")]
    assert found == pytest.approx([0.5, 4.0, *seconds], abs=0.3)
    facts = "request_id", "api", "input_tokens", "prefix_id", "generated_tokens", "parameters", "input", "output"
    values = "c-1", "grpc", 2, "a", 1, "max_new_tokens=3 details=True", None, None
    assert (record.levelname, [vars(record)[name] for name in facts]) == (level, [*values])


def test_of_lists_of_tokens_only_the_lengths_are_logged(server: LocalServer, stub: Stub) -> None:
    request = unary_request("abc", 0, stop_token_ids=[7, 8])  # the default
    request.params.decoding.bad_words.extend(["zy", "x"])
    request.params.decoding.allowed_token_ids.extend(range(5, 250))
    stub.Generate(request, metadata=metadata("lists"))
    (line,) = lines(server, "lists")
    lengths = {"stop_token_ids=2", "allowed_token_ids=245", "bad_words=4", "max_new_tokens=20"}
    assert set(line["parameters"].split()) == lengths


def test_the_limit_that_held_is_logged_and_flags_without_text(server: LocalServer) -> None:
    body: dict[str, object] = {
        "prompt": "abc" * 666,
        "stop": ["xyz"],
        "temperature": 0,
        "logprobs": 1,
        "guided_regex": "(abc)+",
        "seed": 0,
    }
    assert server.post("/v1/completions", body, 60, **{"X-Correlation-Id": "http"})[0] == 200
    (line,) = lines(server, "http")
    shown = f"max_new_tokens={2048 - 3 * 666} stop_sequences=1 details=True grammar=regex"
    assert (line["parameters"], line["api"], line["level"]) == (shown, "openai", "INFO")
    assert not line.keys() & {"prefix_id", "input", "output"}


def test_the_correlation_id_is_in_the_trailing_metadata(stub: Stub) -> None:
    _, done = stub.Generate.with_call(unary_request("abc", 3), metadata=metadata("unary-id"))
    stream = stub.GenerateStream(as_stream_request(unary_request("abc", 3)), metadata=metadata("stream-id"))
    list(stream)
    with pytest.raises(grpc.RpcError) as caught:
        stub.Generate(unary_request("abc", 99999), metadata=metadata("failed-id"))
    error: Any = caught.value
    for call, sent in ((done, "unary-id"), (stream, "stream-id"), (error, "failed-id")):
        assert dict(call.trailing_metadata())["x-correlation-id"] == sent


def test_cancelled_calls_have_their_lines_too(server: LocalServer, stub: Stub) -> None:
    stream = stub.GenerateStream(as_stream_request(unary_request("abc", 500)), metadata=metadata("cancelled-id"))
    next(stream), next(stream)
    stream.cancel()
    (line,) = lines(server, "cancelled-id")
    assert (line["request_id"], line["level"]) == ("cancelled-id", "INFO")  # nothing is wrong with the server
    first_tokens = "tgi_request_time_to_first_token_duration_count"
    before = server.metric(first_tokens)
    call = stub.Generate.future(unary_request("abc", 500), metadata=metadata("impatient-id"))
    wait_until(lambda: server.metric(first_tokens) > before, "token")
    call.cancel()
    (line,) = lines(server, "impatient-id")
    assert 1 <= line["generated_tokens"] < 500
    assert line["message"] == f"single request: {line['generated_tokens']} tokens, CANCELLED"


PAIRS = " | ".join(f"{a} {b}" for a in "vwxyz" for b in "vwxyz")
POISONED = "Request failed during generation: a poisoned row"
AMBIGUOUS = "\n".join(["root ::= x", *(f"{name} ::= {PAIRS} | [ab]" for name in "vwxyz")])  # more with each token


def test_only_what_is_wrong_with_the_server_is_an_error(server: LocalServer, stub: Stub) -> None:
    """A call that fails after it was queued has a line, and so has its input."""
    ambiguous = unary_request("ab", 500)
    ambiguous.params.decoding.grammar = AMBIGUOUS
    too_many = pb.BatchedGenerationRequest(requests=[pb.GenerationRequest(text="a")] * 513)
    for request, level, messages in (
        (unary_request("!", 5), "ERROR", [f"single call failed: {POISONED}", "single request: 0 tokens, ERROR"]),
        (ambiguous, "INFO", ["single call failed: the grammar cannot be followed", "tokens, ERROR"]),
        (too_many, "INFO", ["batch call failed: requests has 513 inputs, at most 512 allowed"]),
    ):
        with pytest.raises(grpc.RpcError):
            stub.Generate(request, metadata=metadata(messages[0]))
        entries = lines(server, messages[0], len(messages))
        assert [line["level"] for line in entries] == [level] * len(messages)
        assert all(line["message"].endswith(text) for line, text in zip(entries, messages, strict=True))


def test_no_text_and_no_credentials_are_logged(server: LocalServer, stub: Stub) -> None:
    stub.Generate(unary_request(SECRET, 60, stop_sequences=["zzz"]), metadata=metadata("secret-id"))
    lines(server, "secret-id")
    assert not [word for word in ("swordfish", "zzz", "sesame") if word in server.log.read_text()]


def test_truncated_text_is_logged_with_log_text(tmp_path: Path) -> None:
    with local_server(tmp_path, STEPS, JSON_OUTPUT=True, LOG_TEXT=True) as server, server.stub() as stub:
        stub.Generate(unary_request(SECRET, 60), metadata=metadata("open-id"))
        (line,) = lines(server, "open-id")
    assert line["input"] == line["output"] == SECRET[:32]
