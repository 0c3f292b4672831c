"""The load generator over HTTP, against a server that keeps its own books; bytes as TGI and vLLM send them."""

import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

import fake_hub
import pytest

from tgis.__main__ import run
from tgis.bench.client import BenchSettings, RequestRecord
from tgis.bench.openai import OpenAIRequests
from tgis.bench.summary import request_times
from tgis.frontend.metric_families import MetricFamilies, SpeculationFamilies

APIS = {"tgi": ["--api", "tgi"], "openai": ["--api", "openai"], "chat": ["--api", "openai", "--chat"]}
PATHS = {"tgi": "/generate_stream", "openai": "/v1/completions", "chat": "/v1/chat/completions"}
TEMPLATE_TOKENS = 5  # around the prompt of a chat
NEW_TOKENS = 6

Book = list[tuple[str, dict[str, Any]]]


@dataclass
class Answers:
    """What the server answers, and what it has been asked."""

    usage: bool = True
    newline: bytes = b"\n"
    piece: int | None = None  # bytes of the stream that are sent at a time
    tokens_per_chunk: int = 1  # OpenAI's API only
    refuse: dict[int, int] = field(default_factory=dict)  # number of the request to generate -> status
    break_off: dict[int, bytes] = field(default_factory=dict)  # number of the request -> its last event
    counts_input: bool = True  # TGI's API only
    count_headers: dict[str, str] = field(default_factory=dict)  # of whole answers, instead of the right ones
    asked: Book = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    families: MetricFamilies | None = None  # at /metrics
    ahead: SpeculationFamilies | None = None  # of these; each look at them counts a step

    @property
    def generated(self) -> Book:
        """Requests but those that count the tokens of words."""
        return [(path, body) for path, body in self.asked if _tokens_wanted(body) != 1]


def _tokens_wanted(body: dict[str, Any]) -> int:
    wanted: int = body["parameters"]["max_new_tokens"] if "parameters" in body else body["max_tokens"]
    return wanted


def _words(body: dict[str, Any]) -> int:
    text = body["messages"][0]["content"] if "messages" in body else body.get("prompt") or body["inputs"]
    return len(text.split()) + 1 + TEMPLATE_TOKENS * ("messages" in body)


def _usage(body: dict[str, Any]) -> dict[str, int]:
    return {"prompt_tokens": _words(body), "completion_tokens": _tokens_wanted(body)}


def _tgi_events(body: dict[str, Any], answers: Answers) -> Iterator[bytes]:
    count = _tokens_wanted(body)
    for index in range(1, count + 1):
        token = {"id": 7, "text": "" if index == 2 else " a", "logprob": -0.1, "special": False}
        event = {"index": index, "token": token, "generated_text": None, "details": None}
        if index == count:
            details = {"finish_reason": "length", "generated_tokens": count, "seed": None}
            if answers.counts_input:
                details["input_length"] = _words(body)
            event |= {"generated_text": " a" * count, "details": details}
        yield json.dumps(event).encode()


def _openai_events(body: dict[str, Any], answers: Answers) -> Iterator[bytes]:
    def chunk(choice: dict[str, Any]) -> bytes:
        return json.dumps({"id": "x", "choices": [{"index": 0, **choice}], "usage": None}).encode()

    if "messages" in body:
        yield chunk({"delta": {"role": "assistant", "content": ""}})
    for _ in range(0, _tokens_wanted(body), answers.tokens_per_chunk):
        yield chunk({"delta": {"content": " a"}} if "messages" in body else {"text": " a"})
    yield chunk({"delta": {}, "finish_reason": "length"} if "messages" in body else {"text": ""})
    if answers.usage and body["stream_options"]["include_usage"]:
        yield json.dumps({"id": "x", "choices": [], "usage": _usage(body)}).encode()
    yield b"[DONE]"


class Handler(BaseHTTPRequestHandler):
    """Handles the connections to a server that has `answers`."""

    protocol_version = "HTTP/1.1"
    answers: Answers

    def log_message(self, *_args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.answers.headers.append(dict(self.headers))
        if self.answers.families and self.path == "/metrics":
            assert self.answers.ahead
            for counter, count in zip(self.answers.ahead.counters, (6, 4, 2, 1), strict=True):
                counter.inc(count)
            self.answers.ahead.step_tokens.observe(4)
            self.answers.ahead.step_tokens.observe(3)
            return self._answer(200, self.answers.families.scrape())
        models = {"/info": {"model_id": "m"}, "/v1/models": {"data": [{"id": "m"}]}}
        return self._answer(200, models[self.path])

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.answers.asked.append((self.path, body))
        number = len(self.answers.generated) - 1
        if number in self.answers.refuse:
            self._answer(self.answers.refuse[number], {"error": "as the test wants it"})
        elif self.path == "/generate":
            counts = {"x-prompt-tokens": str(_words(body)), "x-generated-tokens": str(_tokens_wanted(body))}
            self._answer(200, {"generated_text": " a"}, **counts | self.answers.count_headers)
        elif self.path == "/generate_stream" or body.get("stream"):
            self._stream(body, self.answers.break_off.get(number))
        else:
            self._answer(200, {"choices": [], "usage": _usage(body) if self.answers.usage else None})

    def _answer(self, status: int, body: Any, **headers: str) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(data))}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, body: dict[str, Any], break_off: bytes | None) -> None:
        events = list((_openai_events if "model" in body else _tgi_events)(body, self.answers))
        if break_off is not None:
            events[2:] = [break_off]
        data = b"".join(b"data: " + event + 2 * self.answers.newline for event in events)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        step = self.answers.piece or len(data)
        for piece in (data[at : at + step] for at in range(0, len(data), step)):
            self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")


@contextmanager
def serving(answers: Answers) -> Iterator[str]:
    with fake_hub.serving(Handler, answers=answers) as address:
        yield address.removeprefix("http://")


def bench_at(target: str, api: str, *options: str) -> int:
    lengths = ("--input-tokens", "20", "--output-tokens", str(NEW_TOKENS), "--warmup", "0")
    return run(["bench", *APIS[api], "--target", target, *lengths, *options])


def bench(answers: Answers, api: str, *options: str) -> int:
    with serving(answers) as target:
        return bench_at(target, api, *options)


def level_of(capsys: pytest.CaptureFixture[str]) -> tuple[str, dict[str, Any]]:
    """What was printed, and the figures of the only level."""
    text = capsys.readouterr().out
    (level,) = json.loads(text.splitlines()[-1])["levels"]
    return text, level


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("how", [{}, {"piece": 7}, {"tokens_per_chunk": 3}, {"newline": b"\r\n", "piece": 11}])
def test_streams_are_counted_exactly(api: str, how: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    answers = Answers(**how)
    assert bench(answers, api, "--requests", "5", "--concurrency", "2") == 0
    text, level = level_of(capsys)
    assert "input lengths are in words" not in text
    assert (level["ok"], level["failed"], level["short"], level["counted_by_events"]) == (5, {}, 0, 0)
    assert (level["input_tokens"], level["output_tokens"]) == (5 * 20, 5 * NEW_TOKENS)
    assert level["ttft_ms"]["p50"] > 0
    assert {path for path, _ in answers.generated} == {PATHS[api]}


def test_requests_are_greedy_and_go_on_after_the_end_of_sequence() -> None:
    answers = Answers()
    for api in APIS:
        assert bench(answers, api, "--requests", "1", "--quiet") == 0
    tgi, completion, chat = (body for _, body in answers.generated)
    assert tgi["parameters"]["ignore_eos_token"]
    assert "do_sample" not in tgi["parameters"]
    for body in (completion, chat):
        assert (body["model"], body["temperature"], body["ignore_eos"], body["stream"]) == ("m", 0, True, True)
    assert chat["messages"][0]["role"] == "user"


@pytest.mark.parametrize("api", APIS)
def test_whole_answers(api: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(Answers(), api, "--requests", "3", "--unary", "--no-ignore-eos") == 0
    _, level = level_of(capsys)
    assert (level["input_tokens"], level["output_tokens"]) == (3 * 20, 3 * NEW_TOKENS)
    assert level["ttft_ms"]["p50"] is None


def test_a_server_that_counts_no_tokens_gets_words(capsys: pytest.CaptureFixture[str]) -> None:
    answers = Answers(counts_input=False)
    assert bench(answers, "tgi", "--requests", "2") == 0
    assert "input lengths are in words" in level_of(capsys)[0]
    assert [len(body["inputs"].split()) for _, body in answers.generated] == [20, 20]


@pytest.mark.parametrize(
    ("seconds", "times"),
    [(1.0, {"latency": -1.0, "ttft": 1.0, "gap": 1.0, "tpot": 1 / 3}), (0.0, {"latency": -1.0, "ttft": 1.0})],
)
def test_times_of_chunks_of_several_tokens(seconds: float, times: dict[str, float]) -> None:
    """Two chunks of three tokens, a second apart or at once: then there is no time per token."""
    api, record = (
        OpenAIRequests(BenchSettings(target="h")),
        RequestRecord(scheduled_at=0.0, requested_tokens=NEW_TOKENS),
    )
    body = api.body("the cat", NEW_TOKENS)
    for number, event in enumerate(_openai_events(body, Answers(tokens_per_chunk=3))):
        api.record_event(event, 1.0 + number * seconds, record)
    record.ended_at = -1.0
    assert request_times(record) == pytest.approx(times)


def test_without_usage_messages_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(Answers(usage=False), "openai", "--requests", "2") == 0
    text, level = level_of(capsys)
    assert (level["output_tokens"], level["counted_by_events"]) == (2 * NEW_TOKENS, 2)
    assert "does not say how many tokens it generates: messages are counted" in text
    assert "input lengths are in words" in text


@pytest.mark.parametrize(
    ("api", "error", "status"),
    [
        ("tgi", {"error": "as the test wants it", "error_type": "generation"}, "generation"),
        ("openai", {"error": {"message": "as the test wants it"}}, "error"),
    ],
)
def test_failures_are_counted_by_status(
    api: str, error: dict[str, Any], status: str, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = json.dumps({"choices": [{"text": "a"}], "index": 1}).encode()
    answers = Answers(refuse={1: 429, 2: 429}, break_off={3: json.dumps(error).encode(), 5: whole})
    assert bench(answers, api, "--requests", "8") == 0
    text, level = level_of(capsys)
    assert (level["ok"], level["failed"]) == (4, {"HTTP 429": 2, status: 1, "INCOMPLETE": 1})
    assert re.search("2 failed with HTTP 429, the first: .*as the test wants it", text)


@pytest.mark.parametrize(
    ("api", "how", "option", "error"),
    [
        ("openai", {"break_off": {0: b'{"choices": [{"text": "\xff"}]}'}}, "--stream", "UnicodeDecodeError"),
        ("tgi", {"count_headers": {"x-generated-tokens": "many"}}, "--unary", "ValueError"),
    ],
)
def test_answers_that_cannot_be_read_are_failures(
    api: str, how: dict[str, Any], option: str, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(Answers(**how), api, option, "--requests", "1") == 1
    _, level = level_of(capsys)
    assert (level["ok"], level["failed"]) == (0, {error: 1})


def test_headers_and_a_token_go_with_every_request(tmp_path: Any) -> None:
    (tmp_path / "token").write_text("secret\n")
    answers = Answers()
    with serving(answers) as target:
        options = ("--requests", "1", "--quiet", "--header", "X-Tenant: a:b", "--token-file", str(tmp_path / "token"))
        assert bench_at(f"http://{target}/v1/", "openai", *options) == 0
    (sent,) = answers.headers
    assert (sent["X-Tenant"], sent["authorization"]) == ("a:b", "Bearer secret")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--api", "tgi", "--chat"], "--chat: only with --api openai"),
        (["--api", "tgi", "--model", "m"], "--model: only with --api openai or grpc"),
        (["--api", "tgi", "--prefix-id", "p"], "--prefix-id: only with --api grpc"),
        (["--api", "openai", "--adapter-id", "a"], "--adapter-id: in OpenAI's API adapters are models, see --model"),
        (["--api", "tgi", "--target", "http://h", "--tls"], "--target http://h: options of TLS need https"),
        (["--server-pid", str(2**29)], f"must be a whole number from 1 to {2**22}"),
        (["--header", "nothing"], "argument --header: 'nothing' must be NAME:VALUE"),
    ],
)
def test_options_that_mean_nothing_are_refused(
    options: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", *options]) == 2
    assert error in capsys.readouterr().err


def test_cpu_time_of_the_server(capsys: pytest.CaptureFixture[str]) -> None:
    before = time.process_time()
    assert bench(Answers(), "tgi", "--requests", "4", "--server-pid", str(os.getpid())) == 0
    text, level = level_of(capsys)
    seconds = level["server_cpu_us_per_token"] * 4 * NEW_TOKENS / 1e6
    assert level["client_cpu"] * level["duration_s"] == pytest.approx(seconds, rel=0.2)  # both are this process
    assert 0 < seconds < time.process_time() - before
    assert "server CPU" in text


def test_tokens_that_the_server_computes_ahead(capsys: pytest.CaptureFixture[str]) -> None:
    families = MetricFamilies()
    answers = Answers(families=families, ahead=SpeculationFamilies(families))
    with serving(answers) as target:
        assert bench_at(target, "tgi", "--requests", "2", "--metrics", f"http://{target}/metrics") == 0
        text, level = level_of(capsys)
        assert [level[f"{name}_tokens"] for name in ("proposed", "accepted")] == [8, 5]
        assert level["tokens_per_proposal"] == 3.5
        assert "tokens ahead" in text
        for url, told in ((target, "NonHttpUrlClientError"), (f"http://{target}/info?", "")):
            assert bench_at(target, "tgi", "--requests", "1", "--metrics", url) == (1 if told else 0)
            assert told in capsys.readouterr().err


def test_no_such_process(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(Answers(), "tgi", "--server-pid", str(2**22)) == 1  # one more than the most that Linux has
    assert capsys.readouterr().err.splitlines()[-1] == f"tgis: no process {2**22} on this machine"
