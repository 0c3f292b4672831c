"""The commands that call a server, against a scripted one."""

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import grpc
import pytest
from google.protobuf import json_format
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from tables import table

from tgis import __main__
from tgis.pb import generation_pb2 as pb
from tgis.pb import generation_pb2_grpc as pb_grpc


class TimedHealth(health.HealthServicer):
    """Keeps how long its last client waits."""

    def Check(self, request: Any, context: Any) -> Any:
        self.timeout = context.time_remaining()
        return super().Check(request, context)


@dataclass
class Served(pb_grpc.GenerationServiceServicer):
    """Returns scripted responses and records the requests, and the tokens of calls."""

    target: str = ""
    health: TimedHealth = field(default_factory=TimedHealth)
    texts: list[str] = field(default_factory=list)
    status: grpc.StatusCode | None = None
    endless: bool = False
    asked: list[pb.SingleGenerationRequest] = field(default_factory=list)
    tokens: list[object] = field(default_factory=list)
    timeouts: list[float] = field(default_factory=list)
    names: list[tuple[str, str]] = field(default_factory=list)
    cancelled: threading.Event = field(default_factory=threading.Event)

    def GenerateStream(
        self, request: pb.SingleGenerationRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.GenerationResponse]:
        self.asked.append(request)
        self._record_token(context)
        context.add_callback(self.cancelled.set)
        yield pb.GenerationResponse(input_token_count=3)
        for count, text in enumerate(self.texts, 1):
            yield pb.GenerationResponse(text=text, generated_token_count=count)
        if self.status is not None:
            context.abort(self.status, "the reason\nin two lines")
        if self.endless:
            self.cancelled.wait(30)
        yield pb.GenerationResponse(generated_token_count=len(self.texts), stop_reason=pb.MAX_TOKENS)

    def Tokenize(self, request: pb.BatchedTokenizeRequest, context: grpc.ServicerContext) -> pb.BatchedTokenizeResponse:
        self._record_token(context)
        assert request.return_tokens
        assert request.return_offsets
        self.names.append((request.adapter_id, request.prefix_id))
        text = request.requests[0].text.encode()
        words = [*re.finditer(rb"\S+", text), *re.finditer(rb"\xc3\xa9", text)]  # é has two tokens
        offsets = [pb.TokenizeResponse.Offset(start=word.start(), end=word.end()) for word in words]
        tokens = ["<s>", *(f"Ġ{word[0].decode()}" for word in words)]
        offsets.insert(0, pb.TokenizeResponse.Offset(start=0, end=0))
        response = pb.TokenizeResponse(token_count=len(tokens), tokens=tokens, offsets=offsets)
        return pb.BatchedTokenizeResponse(responses=[response])

    def ModelInfo(self, request: pb.ModelInfoRequest, context: grpc.ServicerContext) -> pb.ModelInfoResponse:
        self._record_token(context)
        return pb.ModelInfoResponse(
            model_kind=pb.ModelInfoResponse.ENCODER_DECODER, max_sequence_length=512, fingerprint="fp_1"
        )

    def _record_token(self, context: grpc.ServicerContext) -> None:
        self.tokens.append(dict(context.invocation_metadata()).get("authorization"))
        self.timeouts.append(context.time_remaining())


@pytest.fixture
def served() -> Iterator[Served]:
    server = grpc.server(futures.ThreadPoolExecutor(4))
    service = Served()
    pb_grpc.add_GenerationServiceServicer_to_server(service, server)
    health_pb2_grpc.add_HealthServicer_to_server(service.health, server)
    service.target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield service
    server.stop(None).wait()


Tgis = Callable[..., tuple[int, str, str]]


@pytest.fixture
def tgis(served: Served, capsys: pytest.CaptureFixture[str]) -> Tgis:
    """Runs a command against the server; exit code, stdout, stderr."""

    def run(command: str, *argv: str) -> tuple[int, str, str]:
        code = __main__.run([command, "--target", served.target, *argv])
        return code, *capsys.readouterr()

    return run


@table("parameters", "tgis generate")
def test_generate_sends_its_options(served: Served, tgis: Tgis, row: dict[str, Any]) -> None:
    assert tgis("generate", "hello", *row["options"].split())[0] == 0
    empty: dict[str, Any] = {"sampling": {}, "stopping": {}, "decoding": {}, "response": {}}
    request = {"request": {"text": "hello"}, "params": empty | row["params"]}
    assert served.asked == [json_format.ParseDict(request, pb.SingleGenerationRequest())]


def test_no_proxy_for_this_machine(served: Served, tgis: Tgis, monkeypatch: pytest.MonkeyPatch) -> None:
    """To a proxy, localhost is another machine."""
    monkeypatch.delenv("no_proxy")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    served.health.set("", health_pb2.HealthCheckResponse.SERVING)
    port = served.target.partition(":")[2]
    for target in (served.target, f"dns:///localhost:{port}", f"ipv4:127.0.0.1:{port}"):
        assert tgis("health", "--service=", "--target", target) == (0, "SERVING\n", ""), target
    error = tgis("health", "--service=", "--target", f"tgis.invalid:{port}")[2]
    assert "nothing listens at" in error  # the proxy refused: the name itself has no address


def test_generate_reads_stdin(served: Served, tgis: Tgis, monkeypatch: pytest.MonkeyPatch) -> None:
    said = list[tuple[int, str, str]]()
    for text, on_terminal in ((b"from\nstdin", False), (b"\xff", True)):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
        monkeypatch.setattr(sys.stdin, "isatty", mock.Mock(return_value=on_terminal))
        said.append(tgis("generate"))
    assert said[0] == (0, "", "")
    assert said[1] == (2, "", "enter the text, end with Ctrl-D:\ntgis: the text is not UTF-8\n")
    assert served.asked[0].request.text == "from\nstdin"
    assert tgis("generate", "\udcff") == (2, "", "tgis: the text is not UTF-8\n")
    assert r"'a\udcff' is not UTF-8" in tgis("generate", "x", "--stop", "a\udcff")[2]


def test_generate_writes_json(served: Served, tgis: Tgis) -> None:
    served.texts = ["a\nb"]
    code, out, _ = tgis("generate", "--json", "x", "--adapter-id", "a", "--prefix-id", "p")
    assert code == 0
    assert (served.asked[0].adapter_id, served.asked[0].prefix_id) == ("a", "p")
    assert [json.loads(line) for line in out.splitlines()] == [
        {"inputTokenCount": 3},
        {"text": "a\nb", "generatedTokenCount": 1},
        {"generatedTokenCount": 1, "stopReason": "MAX_TOKENS"},
    ]


def test_the_text_is_written_as_it_is_and_an_error_status_in_one_line(served: Served, tgis: Tgis) -> None:
    served.status = grpc.StatusCode.RESOURCE_EXHAUSTED
    served.texts = ["Once ", "upon\n", "a\x1b[31m time"]
    said = f"tgis: {served.target}: RESOURCE_EXHAUSTED: the reason in two lines\n"
    assert tgis("generate", "x") == (1, "Once upon\na\x1b[31m time", said)


def test_interrupting_generate_cancels_the_call(served: Served) -> None:
    served.texts, served.endless = ["started"], True
    command = [sys.executable, "-m", "tgis", "generate", "--target", served.target, "x"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(7) == b"started"
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
        assert process.stderr.read() == b""
    assert served.cancelled.wait(20)


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_has_left_is_no_traceback(unbuffered: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    env = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    command = [sys.executable, "-m", "tgis", "--help"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, env=env, check=False)
    os.close(writer)
    assert done.stderr == b""


def test_a_full_disk_is_one_line() -> None:
    command = [sys.executable, "-m", "tgis", "--version"]
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (1, b"tgis: cannot write: No space left on device\n")


def test_a_terminal_gets_no_control_characters_but_statistics(served: Served) -> None:
    family = "\U0001f468\u200d\U0001f469"  # joined by a character that is not printable
    served.texts = ["a\t\x1b[31mb\n", f"\x9b\u00e9{family}"]
    (ours, theirs), written = os.openpty(), b""
    command = [sys.executable, "-m", "tgis", "generate", "--target", served.target, "x"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        with contextlib.suppress(OSError):  # nobody has the terminal open any more
            while data := os.read(ours, 4096):
                written += data
        assert process.wait(20) == 0
    os.close(ours)
    text, _, statistics = written.decode().partition("\x1b[2m")
    assert text == f"a\t\ufffd[31mb\r\n\ufffdé{family}\r\n"
    assert statistics.startswith("2 tokens in ")
    assert ", MAX_TOKENS\x1b[0m" in statistics


def test_tokenize(served: Served, tgis: Tgis) -> None:
    code, out, err = tgis("tokenize", "hello w\x07rld\n\té")
    assert (code, err) == (0, "5 tokens\n")
    assert [line.split("  ")[-1] for line in out.splitlines()] == ["<s>", "hello", " w\ufffdrld", "\\n\\té", "é"]
    assert out.splitlines()[2] == "     6     11   w\ufffdrld"
    code, line, _ = tgis("tokenize", "--json", "a b", "--adapter-id", "a", "--prefix-id", "p")
    assert (code, line.count("\n"), json.loads(line)["tokenCount"]) == (0, 1, 3)
    assert served.names == [("", ""), ("a", "p")]


def test_model_info(tgis: Tgis) -> None:
    expected = "model_kind ENCODER_DECODER max_sequence_length 512 max_new_tokens 0 fingerprint fp_1"
    code, out, _ = tgis("model-info")
    assert (code, " ".join(out.split())) == (0, expected)
    code, line, _ = tgis("model-info", "--json")
    assert (code, line.count("\n"), json.loads(line)["maxSequenceLength"]) == (0, 1, 512)


def test_health(served: Served, tgis: Tgis) -> None:
    assert tgis("health", "--service", "") == (0, "SERVING\n", "")
    assert 4 < served.health.timeout < 5.5
    served.health.set("fmaas.GenerationService", health_pb2.HealthCheckResponse.NOT_SERVING)
    assert tgis("health") == (1, "NOT_SERVING\n", "")
    served.health.set("fmaas.GenerationService", health_pb2.HealthCheckResponse.SERVING)
    assert tgis("health") == (0, "SERVING\n", "")
    assert tgis("health", "--service", "other") == (1, "", f"tgis: {served.target}: NOT_FOUND:\n")


def test_grpc_healthcheck(served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The probe of vllm-tgis-adapter; TGIS's service is not there yet at first."""
    monkeypatch.setattr(
        sys, "argv", ["grpc_healthcheck", "--server-url", served.target, "--timeout", "3", "--insecure"]
    )
    assert (__main__.grpc_healthcheck(), "NOT_FOUND" in capsys.readouterr().err) == (1, True)
    for name, code in (("NOT_SERVING", 1), ("SERVING", 0)):
        served.health.set("fmaas.GenerationService", health_pb2.HealthCheckResponse.ServingStatus.Value(name))
        assert (__main__.grpc_healthcheck(), capsys.readouterr().out) == (code, f"{name}\n")
    assert 2 < served.health.timeout < 3.5
    sys.argv += ["--service-name", "other"]
    assert __main__.grpc_healthcheck() == 1
    del sys.argv[3:5]  # the default
    assert (__main__.grpc_healthcheck(), served.health.timeout < 1.5) == (1, True)
    sys.argv += ["--secure"]
    assert (__main__.grpc_healthcheck(), "has no TLS" in capsys.readouterr().err) == (1, True)


@table("options", "clients")
def test_an_option_that_cannot_be_used_is_one_line(tgis: Tgis, row: dict[str, str]) -> None:
    code, out, err = tgis(*row["line"].split())
    assert (code, out, err.count("\n"), err.startswith(f"tgis: {row['said']}")) == (2, "", 1, True)


def test_a_token_file_has_its_token_in_the_first_line(tgis: Tgis, tmp_path: Path) -> None:
    path = tmp_path / "token"
    for content in (b"", b"\nsecret", b"\xff"):
        path.write_bytes(content)
        assert tgis("health", "--token-file", str(path)) == (2, "", f"tgis: {path}: the first line is no token\n")


@pytest.mark.parametrize("command", [("generate", "x"), ("tokenize", "x"), ("model-info",)])
def test_a_token_goes_with_every_call(served: Served, tgis: Tgis, command: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "token").write_bytes(b"secret\nmore")
    options = ("--timeout", "7", "--token-file", str(tmp_path / "token"))
    assert [tgis(*command, *options)[0] for options in ((), options)] == [0, 0]
    assert served.tokens == [None, "Bearer secret"]
    assert served.timeouts[0] > 9 > 8 >= served.timeouts[1]


def test_a_call_ends_at_its_timeout(served: Served, tgis: Tgis) -> None:
    served.endless = True
    code, _, err = tgis("generate", "x", "--timeout", "0.2")
    assert code == 1
    assert err == f"tgis: {served.target} has not answered completely in time (--timeout)\n"
