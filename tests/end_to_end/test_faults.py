"""Faults around the service: dead and stuck engines, signals, lack of memory, and failing starts."""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from harness import Server, as_stream_request, failure, running_fake, server_environment, unary_request, wait_until
from local_server import LocalServer, serving_locally
from tokenizers import Tokenizer

from demo.fake_model import make_fake_model
from tgis.pb import generation_pb2 as pb

SLOW = {"step_seconds": 0.05}


def start(tmp_path: Path, steps: dict[str, Any] | None = None, **options: object) -> Any:
    (tmp_path / "termination").touch()
    return running_fake(tmp_path, steps, TERMINATION_LOG=tmp_path / "termination", **options)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server for the faults that it survives."""
    with running_fake(tmp_path_factory.mktemp("faults"), {"crash_token": 0, "step_seconds": 0.01}) as running:
        yield running


Ends = list[Future[tuple[grpc.StatusCode, str]]]


def open_calls(server: Server, count: int) -> Ends:
    """How calls end, half of which are streams, once all of them run."""
    request, threads = unary_request("never ending story ", 1000), ThreadPoolExecutor(count)

    def end(streamed: bool) -> tuple[grpc.StatusCode, str]:
        with server.stub() as stub:
            return failure(
                lambda: list(stub.GenerateStream(as_stream_request(request))) if streamed else stub.Generate(request)
            )

    calls = [threads.submit(end, n % 2 == 0) for n in range(count)]
    server.wait_for_metric(f"tgi_batch_current_size {count:.1f}")
    assert not any(call.done() for call in calls)
    return calls


def statuses(calls: Ends) -> set[grpc.StatusCode]:
    return {call.result(20)[0] for call in calls}


def health(server: Server, service: str = "") -> Any:
    with grpc.insecure_channel(server.target) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5).status


def text_of(server: Server, request: pb.BatchedGenerationRequest) -> str:
    with server.stub() as stub:
        text: str = stub.Generate(request, timeout=20, wait_for_ready=True).responses[0].text
    return text


def test_health_is_off_while_an_idle_engine_is_stopped(server: Server) -> None:
    assert health(server, "fmaas.GenerationService") == health_pb2.HealthCheckResponse.SERVING
    os.kill(server.engine_pid(), signal.SIGSTOP)
    reason = server.wait_for_health(503)
    assert re.search(r"no heartbeat of the engine process for \d+ s", reason)
    assert health(server) == health_pb2.HealthCheckResponse.NOT_SERVING
    assert "tgi_engine_up 0.0" in server.get("/metrics")[1]
    os.kill(server.engine_pid(), signal.SIGCONT)
    server.wait_for_health(200)
    assert health(server) == health_pb2.HealthCheckResponse.SERVING
    assert "tgi_engine_up 1.0" in server.get("/metrics")[1]
    assert text_of(server, unary_request("abc", 3)) == "abc"


def test_a_request_that_fails_steps_is_retried_alone_and_fails_without_its_neighbours(server: Server) -> None:
    with server.stub() as stub:
        assert failure(lambda: stub.Generate(unary_request("!")))[0] is grpc.StatusCode.INTERNAL
        assert 'tgi_batch_inference_failure{method="prefill",reason="error"} 2.0' in server.get("/metrics")[1]
        texts = [f"number {n} " for n in range(8)]
        calls = [stub.Generate.future(unary_request(text, 40)) for text in texts]
        assert failure(lambda: stub.Generate(unary_request("!")))[0] is grpc.StatusCode.INTERNAL
        for text, future in zip(texts, calls, strict=True):
            assert future.result().responses[0].text == (text * 40)[:40]
    assert server.get("/health") == (200, "")
    assert "a step of 1 sequences failed" in server.log.read_text()


def test_the_engine_exits_when_its_front_end_is_killed(server: Server) -> None:
    """The last test of this server."""
    engine = server.engine_pid()
    server.process.kill()
    server.process.wait()
    wait_until(lambda: not Path(f"/proc/{engine}/stat").exists(), "end of the engine", 5)


def test_killing_the_engine_fails_all_calls_at_once(tmp_path: Path) -> None:
    with start(tmp_path, SLOW) as server:  # whose step timeout is 120 s
        calls = open_calls(server, 4)
        os.kill(server.engine_pid(), signal.SIGKILL)
        assert statuses(calls) == {grpc.StatusCode.UNAVAILABLE}
        assert server.process.wait(20) == 1
    assert "signal 9" in (tmp_path / "termination").read_text()


def test_a_stopped_engine_trips_the_step_timeout(tmp_path: Path) -> None:
    with start(tmp_path, SLOW, STEP_TIMEOUT_SECONDS=1) as server:
        calls = open_calls(server, 4)
        os.kill(server.engine_pid(), signal.SIGSTOP)
        assert statuses(calls) == {grpc.StatusCode.UNAVAILABLE}
        assert "no step for 1 s" in calls[0].result()[1]
        assert server.process.wait(20) == 1
    assert "no step for 1 s" in (tmp_path / "termination").read_text()


def test_a_fatal_engine_error_ends_the_process(tmp_path: Path) -> None:
    with start(tmp_path, {"fatal_token": 0}) as server, server.stub() as stub:
        assert failure(lambda: stub.Generate(unary_request("!")))[0] is grpc.StatusCode.UNAVAILABLE
        assert server.process.wait(20) == 1
    assert "the token that ends this engine" in (tmp_path / "termination").read_text()


def test_sigterm_lets_calls_finish_and_exits_zero(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with start(tmp_path, {"step_seconds": 0.01}, CACHE_DIR=cache) as server, server.stub() as stub:
        environ = Path(f"/proc/{server.engine_pid()}/environ").read_bytes().split(b"\0")
        assert f"TMPDIR={cache}/tmp".encode() in environ
        future = stub.Generate.future(unary_request("abc", 150))
        stream = stub.GenerateStream(as_stream_request(unary_request("abc", 150)))
        next(stream), next(stream)
        server.process.send_signal(signal.SIGTERM)
        assert "shutting down" in server.wait_for_health(503)
        assert 'tgi_state{state="draining"} 1.0' in server.get("/metrics")[1]
        assert failure(lambda: stub.Generate(unary_request("late", 3), timeout=5))
        assert len(future.result().responses[0].text) == 150
        assert sum(len(part.text) for part in stream) >= 145
        assert server.process.wait(20) == 0
        assert "draining: 2 inputs in flight have 30 s to finish" in server.log.read_text()
        assert "s: 0 of 2 inputs were cancelled" in server.log.read_text()
    assert (tmp_path / "termination").read_text() == ""
    assert list((cache / "tmp").iterdir()) == []


def test_the_grace_ends_with_a_second_signal(tmp_path: Path) -> None:
    with start(tmp_path, SLOW, SHUTDOWN_GRACE_SECONDS=1000) as server:
        calls = open_calls(server, 2)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "draining: 2 inputs" in server.log.read_text(), "line in the log")
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(20) == 0  # the calls take 50 s
        assert statuses(calls) == {grpc.StatusCode.UNAVAILABLE}
        assert "s: 2 of 2 inputs were cancelled" in server.log.read_text()


LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def chat(server: Server) -> None:
    server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]})


def tokenize(server: Server) -> None:
    inputs = [pb.TokenizeRequest(text="xq" * ((2 << 20) - 100))]
    with server.stub() as stub:
        stub.Tokenize(pb.BatchedTokenizeRequest(requests=inputs, return_offsets=True))


def check_schemas(server: Server) -> None:
    """One after the other: each takes less than a second."""
    for first in itertools.count():
        members = {f"property {n}": {"oneOf": [{"const": first + i} for i in range(n)]} for n in range(1, 80)}
        request = unary_request("a", 1)
        request.params.decoding.json_schema = json.dumps({"type": "object", "properties": members})
        text_of(server, request)


@pytest.mark.slow
@pytest.mark.parametrize("work", [chat, tokenize, check_schemas])
def test_no_work_delays_the_end_beyond_the_grace(work: Callable[[Server], None], tmp_path: Path) -> None:
    with running_fake(tmp_path, {}, LOOP, SHUTDOWN_GRACE_SECONDS=2) as server, ThreadPoolExecutor(1) as threads:
        call = threads.submit(work, server)
        wait([call], timeout=1)  # it has begun
        assert not call.done()
        assert server.stop(timeout=3) == 0


def fake(tmp_path: Path, **options: object) -> dict[str, str]:
    model = make_fake_model(tmp_path / "model")
    settings: dict[str, object] = {"MODEL_NAME": model, "CACHE_DIR": tmp_path / "cache", "GRPC_PORT": 0, "PORT": 0}
    return server_environment(**{"DEPLOYMENT_FRAMEWORK": "fake"} | settings | options)


@pytest.mark.parametrize("json_output", [False, True])
def test_a_start_that_fails_says_why_in_one_line_and_in_the_termination_log(tmp_path: Path, json_output: bool) -> None:
    """Of a model that is missing, and of one that the engine process cannot load."""
    (tmp_path / "termination").touch()
    options = {"JSON_OUTPUT": True} if json_output else {"MODEL_NAME": "/nowhere"}
    environ = fake(tmp_path, TERMINATION_LOG=tmp_path / "termination", **options)
    make_fake_model(tmp_path / "model", step_seconds="long")
    command = [sys.executable, "-m", "tgis", "serve"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    (reason,) = (tmp_path / "termination").read_text().splitlines()
    assert ("step_seconds" if json_output else "/nowhere") in reason
    if json_output:
        last = [json.loads(line) for line in done.stdout.splitlines()][-1]
        assert (done.stderr, last["level"], last["message"]) == ("", "CRITICAL", reason)
        assert "the engine process cannot go on" in done.stdout
    else:
        assert done.stderr == f"tgis: {reason}\n"


def test_a_signal_while_the_server_starts_ends_it_with_exit_code_0(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-X", "importtime", "-m", "tgis", "serve"]
    with subprocess.Popen(command, env=fake(tmp_path), stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            while process.stderr.readline().split()[-1] != "tgis.frontend.tokenizer":
                pass
            process.send_signal(signal.SIGHUP)
            rest = process.stderr.readlines()
            process.wait(60)
        finally:
            process.kill()  # else a server that goes on would hold up the end of the block for ever
    assert process.returncode == 0
    assert [line for line in rest if not line.startswith("import time:")] == []


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    """A model without an end, whose tokenizer has a token that it does not know."""
    model = make_fake_model(tmp_path_factory.mktemp("odd"))
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.add_special_tokens(["[PAD]"])
    tokenizer.save(str(model / "tokenizer.json"))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    with serving_locally(model, model) as running:
        yield running


def test_a_model_without_an_end_has_no_structured_output(odd: LocalServer) -> None:
    assert text_of(odd, unary_request("abc", 3)) == "abc"
    request = unary_request("abc", 3)
    request.params.decoding.regex = "a+"
    said = "structured output is not supported with this model: it has no token that ends an output"
    assert failure(lambda: text_of(odd, request)) == (grpc.StatusCode.INVALID_ARGUMENT, f"regex: {said}")
    body = {"inputs": "abc", "parameters": {"grammar": {"type": "regex", "value": "a+"}}}
    status, answer = odd.post("/generate", body)
    assert (status, answer["error"]) == (422, f"Input validation error: regex: {said}")


@pytest.mark.parametrize("text", ["a[PAD]", "[PAD]" + "a" * 100])
def test_an_input_with_a_token_beyond_the_embedding_is_refused(odd: LocalServer, text: str) -> None:
    """Its step would fail, and with it the steps of other inputs."""
    refused, too_large = grpc.StatusCode.INVALID_ARGUMENT, "gives token id 257, the model has only those below 257"
    request = unary_request(text)
    with odd.stub() as stub:
        assert failure(lambda: stub.Generate(request)) == (refused, f"requests[0].text {too_large}")
        stream = stub.GenerateStream(as_stream_request(request))
        assert failure(lambda: list(stream)) == (refused, f"request.text {too_large}")
        (tokens,) = stub.Tokenize(pb.BatchedTokenizeRequest(requests=[pb.TokenizeRequest(text=text)])).responses
        assert tokens.token_count == len(text.replace("[PAD]", "P"))
    said = "the tokenizer has token '[PAD]' with id 257, the model has only ids below 257: inputs with it are refused"
    assert said in odd.log.read_text()
