"""TGI's REST API: a server process with the fake engine, which repeats its prompt."""

import http.client
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import Server, running_fake
from hypothesis import example, given
from hypothesis import strategies as st
from repository import REPOSITORY

from tgis.api.tgi.convert import json_float

MAX_LENGTH, MAX_NEW, MAX_INPUTS = 200, 150, 8
POISON = "!"  # token 0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    steps = {"max_sequence_length": MAX_LENGTH, "step_seconds": 0.002, "poison_token": 0}
    steps["memory_tokens"] = MAX_LENGTH - 20
    options = {"MAX_NEW_TOKENS": MAX_NEW, "MAX_CONCURRENT_REQUESTS": MAX_INPUTS, "MAX_INPUT_TOKENS": 160}
    options |= {"MAX_BEST_OF": 3, "PAYLOAD_LIMIT": 100_000}
    with running_fake(tmp_path_factory.mktemp("tgi"), steps, **options) as running:
        yield running


class Client:
    """Asks a server."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def connect(self) -> http.client.HTTPConnection:
        assert self._server.api_port is not None
        return http.client.HTTPConnection("127.0.0.1", self._server.api_port, timeout=30)

    def ask(self, path: str, body: Any = None, **parameters: Any) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of a POST with these inputs or this body; of a GET without."""
        if isinstance(body, str):
            body = {"inputs": body} | ({"parameters": parameters} if parameters else {})
        content = json.dumps(body).encode() if isinstance(body, dict) else body
        headers = {"Content-Type": "application/json"}
        with closing(self.connect()) as connection:
            connection.request("GET" if body is None else "POST", path, content, headers)
            answer = connection.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()

    def json(self, path: str, body: Any = None, **parameters: Any) -> Any:
        status, _, content = self.ask(path, body, **parameters)
        assert status == 200, content
        return json.loads(content)

    def events(self, path: str, body: Any, **parameters: Any) -> list[Any]:
        status, headers, content = self.ask(path, body, **parameters)
        assert (status, headers["content-type"]) == (200, "text/event-stream"), content
        *lines, last = content.split(b"\n\n")
        assert last == b""
        return [json.loads(line.removeprefix(b"data: ")) for line in lines]


@pytest.fixture(scope="module")
def client(server: Server) -> Client:
    return Client(server)


def test_the_bytes_of_a_stream(client: Client) -> None:
    golden = (REPOSITORY / "tests/golden/generate_stream.sse").read_bytes()
    given = {"max_new_tokens": 20, "details": True, "top_n_tokens": 2, "do_sample": True, "seed": 7}
    status, headers, content = client.ask("/generate_stream", "hé</s>", **given)
    assert (status, content) == (200, golden)
    assert {name: headers[name] for name in ("content-type", "cache-control", "x-accel-buffering")} == {
        "content-type": "text/event-stream",
        "cache-control": "no-cache",
        "x-accel-buffering": "no",
    }
    assert (headers["x-compute-type"], headers["x-compute-characters"]) == ("1-none", "6")


def test_details(client: Client) -> None:
    given = {"max_new_tokens": 2, "decoder_input_details": True, "top_n_tokens": 1}
    answer = client.json("/generate", "ab", **given)
    tokens = [{"id": 64 + n, "text": text, "logprob": -0.5, "special": False} for n, text in enumerate("ab")]
    assert answer == {
        "generated_text": "ab",
        "details": {
            "finish_reason": "length",
            "generated_tokens": 2,
            "seed": None,
            "prefill": [{"id": 64 + n, "text": text, "logprob": -0.5} for n, text in enumerate("ab")],
            "tokens": tokens,
            "top_tokens": [[token] for token in tokens],
        },
    }
    assert list(answer["details"])[:3] == ["finish_reason", "generated_tokens", "seed"]


@pytest.mark.parametrize(
    ("inputs", "parameters", "text", "reason", "number"),
    [
        ("ab</s>cd", {"max_new_tokens": 30}, "ab", "eos_token", 3),
        ("ab</s>cd", {"max_new_tokens": 3}, "ab", "length", 3),  # checked first
        ("ab</s>cd", {"max_new_tokens": 4, "ignore_eos_token": True}, "abc", "length", 4),
        ("one two", {"max_new_tokens": 30, "stop": ["xyz", " t"]}, "one t", "stop_sequence", 5),
        ("one two", {"max_new_tokens": 30, "stop_sequences": ["e t"]}, "one t", "stop_sequence", 5),
        ("one two", {"max_new_tokens": 5, "stop": [" t"]}, "one t", "length", 5),
        ("abcdefgh", {"max_new_tokens": 4, "truncate": 3}, "fghf", "length", 4),
    ],
)
def test_ends(client: Client, inputs: str, parameters: dict[str, Any], text: str, reason: str, number: int) -> None:
    details = client.json("/generate", inputs, details=True, **parameters)
    assert details["generated_text"] == text
    assert (details["details"]["finish_reason"], details["details"]["generated_tokens"]) == (reason, number)
    last = client.events("/generate_stream", inputs, details=True, **parameters)[-1]
    assert (last["index"], last["generated_text"]) == (number, text)
    assert (last["details"]["finish_reason"], last["details"]["generated_tokens"]) == (reason, number)


def test_without_a_number_of_tokens_all_that_fits_is_generated(client: Client) -> None:
    answer = client.json("/generate", "x" * 30, details=True)["details"]
    assert (answer["generated_tokens"], answer["finish_reason"]) == (MAX_NEW, "length")


@pytest.mark.parametrize(
    ("parameters", "samples"),
    [
        (None, True),  # absent
        ({}, False),
        ({"temperature": 1.0}, False),
        ({"temperature": 0.7}, True),
        ({"do_sample": True}, True),
        ({"top_k": 3}, True),
        ({"top_p": 0.9}, True),
        ({"typical_p": 0.9}, True),
        ({"repetition_penalty": 1.2, "frequency_penalty": -1, "watermark": True}, False),
    ],
)
def test_what_switches_sampling_on(client: Client, parameters: dict[str, Any] | None, samples: bool) -> None:
    body: dict[str, Any] = {"inputs": "ab</s>"}
    if parameters is not None:
        body["parameters"] = parameters | {"details": True, "seed": 5}
        assert client.json("/generate", body)["details"]["seed"] == (5 if samples else None)
    else:
        assert client.json("/generate", body) == {"generated_text": "ab"}


def test_best_of(client: Client) -> None:
    details = client.json("/generate", "ab", best_of=3, do_sample=True, max_new_tokens=3, details=True)["details"]
    others = details["best_of_sequences"]
    assert len({each["seed"] for each in [details, *others]}) == 3
    assert [each["generated_text"] for each in others] == ["aba", "aba"]
    assert "best_of_sequences" not in others[0]
    assert client.json("/generate", "ab", best_of=3, do_sample=True, max_new_tokens=3) == {"generated_text": "aba"}


def test_the_root_route_answers_as_clients_expect(client: Client) -> None:
    (answer,) = client.json("/", "ab", max_new_tokens=2)
    assert answer == {"generated_text": "abab"}  # the prompt first
    (answer,) = client.json("/", "ab", max_new_tokens=2, return_full_text=False)
    assert answer == {"generated_text": "ab"}
    events = client.events("/", {"inputs": "ab", "stream": True, "parameters": {"max_new_tokens": 2}})
    assert [event["generated_text"] for event in events] == [None, "abab"]
    assert client.ask("/")[::2] == (200, b"")


def test_headers(client: Client) -> None:
    _, headers, _ = client.ask("/generate", "häns", max_new_tokens=3, truncate=2)
    assert {name: headers[name] for name in headers if "tokens" in name or "characters" in name} == {
        "x-compute-characters": "4",
        "x-prompt-tokens": "2",
        "x-generated-tokens": "3",
    }
    parts = [int(headers[f"x-{name}-time"]) for name in ("validation", "queue", "inference")]
    assert sum(parts) <= int(headers["x-total-time"]) <= sum(parts) + 3
    assert int(float(headers["x-compute-time"]) * 1000) == int(headers["x-total-time"])
    assert int(headers["x-time-per-token"]) == int(headers["x-inference-time"]) // 3


def test_tokenize(client: Client) -> None:
    text = "a é</s>"
    tokens = client.json("/tokenize", text, truncate=1)
    assert [(token["start"], token["stop"], token["text"]) for token in tokens] == [
        (0, 1, "a"),
        (1, 2, " "),
        (2, 4, "é"),
        (2, 4, "é"),
        (4, 8, "</s>"),
    ]
    assert tokens[-1]["id"] == 256


@pytest.mark.parametrize(
    ("length", "bound"),
    [(7_000, ""), (9_000, "the reply has more than 400000 bytes"), (90_000, "the text has more than ")],
)
def test_a_text_has_no_more_tokens_than_fit_into_a_reply(client: Client, length: int, bound: str) -> None:
    status, _, content = client.ask("/tokenize", "a" * length)
    answer = json.loads(content)
    assert status == (422 if bound else 200)
    assert bound in answer["error"] if bound else len(answer) == length


def test_invocations(client: Client) -> None:
    completion = client.json("/invocations", {"prompt": "ab", "max_tokens": 3, "temperature": 0})
    assert completion["choices"][0]["text"] == "aba"
    generated = {"inputs": "ab", "parameters": {"max_new_tokens": 1}}
    assert client.json("/invocations", generated) == [{"generated_text": "aba"}]
    assert len(client.events("/invocations", generated | {"stream": True})) == 1
    status, _, content = client.ask("/invocations", {})
    assert (status, json.loads(content)["error_type"]) == (422, "validation")


def test_a_model_without_a_chat_template_is_422(client: Client) -> None:
    status, _, content = client.ask("/chat_tokenize", {"messages": [{"role": "user", "content": "a"}]})
    assert (status, json.loads(content)["error_type"]) == (422, "template_error")
    assert json.loads(content)["error"].startswith("Template error: ")


def test_info(client: Client) -> None:
    info = client.json("/info")
    limits = {"max_input_tokens": 160, "max_input_length": 160, "max_total_tokens": MAX_LENGTH, "max_best_of": 3}
    assert limits.items() <= info.items()
    assert (info["max_concurrent_requests"], info["max_stop_sequences"], info["router"]) == (MAX_INPUTS, 4, "tgis")


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"inputs": ""}, "$.inputs"),
        ({"inputs": "x" * 190, "max_new_tokens": 20}, "plus max_new_tokens (20) must be <= 200"),
        ({"inputs": "x" * 170}, "170 tokens, at most 160"),
        ({"inputs": "x" * 300}, "300"),
        ({"best_of": 4, "do_sample": True}, "`best_of` must be > 0 and <= 3"),
        ({"best_of": 2}, "must use sampling"),
        ({"best_of": 2, "temperature": 1.0, "seed": 1}, "`seed` must not be set"),
        ({"temperature": 0}, "temperature"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"frequency_penalty": 2.1}, "frequency_penalty"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.0}, "top_p"),
        ({"typical_p": 1}, "typical_p"),
        ({"top_k": 0}, "top_k"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": MAX_NEW + 1}, f"max_new_tokens must be <= {MAX_NEW}"),
        ({"stop": ["a"] * 5}, "`stop` supports up to 4"),
        ({"stop": [""]}, "parameters.stop"),
        ({"top_n_tokens": 11}, "top_n_tokens must be <= 10"),
        ({"seed": 2**64}, "`seed` must be <="),
        ({"seed": -1}, "seed"),
        ({"truncate": 0}, "truncate"),
        ({"truncate": 161}, "`truncate` must be > 0 and <= 160"),
        ({"grammar": {"type": "regex", "value": "("}}, "regex: invalid regex: unclosed group"),
        ({"grammar": {"type": "regex", "value": {}}}, "grammar.regex must be a text"),
        ({"grammar": {"type": "json", "value": {"not": {}}}}, 'unsupported keywords: ["not"]'),
        ({"grammar": {"type": "json_schema", "value": {"name": "x"}}}, "grammar.json_schema must have a schema"),
        ({"adapter_id": "none"}, "adapter"),
        ({"stop": "a"}, "stop"),
        ({"details": None}, "details"),
        ({"max_new_tokens": 2.5}, "max_new_tokens"),
    ],
)
def test_invalid_requests_are_422(client: Client, parameters: dict[str, Any], words: str) -> None:
    parameters = dict(parameters)
    inputs = parameters.pop("inputs", "ab")
    for path in ("/generate", "/generate_stream"):
        if path == "/generate_stream" and "best_of" in parameters:
            words = "not supported when streaming"
        status, headers, content = client.ask(path, inputs, **parameters)
        answer = json.loads(content)
        assert (status, headers["content-type"], answer["error_type"]) == (422, "application/json", "validation")
        assert list(answer) == ["error", "error_type"]
        assert answer["error"].startswith("Input validation error: ")
        assert words in answer["error"]


@pytest.mark.parametrize(
    ("kind", "value", "pattern"),
    [
        ("regex", "[ab]{3}c?", "[ab]{3}c?"),
        ("json", {"enum": ["abc", 17]}, '"abc"|17'),
        ("json_object", '{"enum": ["abc", 17]}', '"abc"|17'),
        ("json_schema", {"name": "x", "schema": {"const": "a"}}, '"a"'),
        ("json", {"properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}, r'\{"a":1\}'),
    ],
)
def test_an_output_follows_its_grammar(client: Client, kind: str, value: Any, pattern: str) -> None:
    answer = client.json("/generate", "abc", grammar={"type": kind, "value": value}, max_new_tokens=9)
    assert re.fullmatch(pattern, answer["generated_text"])


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b'{"inputs": "\xff"}', 400),
        (b"[" * 50_000, 422),
        (b"{}", 422),
        (b'{"inputs": 1}', 422),
        (b'{"inputs": "a", "parameters": null}', 422),
        (b'{"inputs": "a", "parameters": {"grammar": {"type": "json", "value": ' + b"[" * 40_000, 400),
        (b'{"inputs": "a", "parameters": {"grammar": {"type": "json", "value": {"a": "\xff"}}}}', 400),
        (b'{"inputs": "a", "parameters": {"grammar": {"type": "json_schema", "value": {"schema": "\xff"}}}}', 400),
        (b'{"inputs": "%s"}' % (b"a" * 100_000), 413),
        (b'{"inputs": "a", "unknown": [1], "parameters": {"other": {}, "max_new_tokens": 1}}', 200),
    ],
)
def test_bodies(client: Client, body: bytes, status: int) -> None:
    found, headers, content = client.ask("/generate", body)
    assert (found, headers["content-type"]) == (status, "application/json")
    if status != 200:
        assert json.loads(content)["error_type"] == "validation"


def test_a_failure_before_the_first_token_is_a_status(client: Client) -> None:
    for path in ("/generate", "/generate_stream"):
        status, _, content = client.ask(path, f"a{POISON}", max_new_tokens=3)
        answer = json.loads(content)
        assert (status, answer["error_type"]) == (424, "generation")
        assert answer["error"].startswith("Request failed during generation: ")


def test_a_failure_after_it_is_an_event(client: Client) -> None:
    *tokens, error = client.events("/generate_stream", "x" * 100, max_new_tokens=90)
    assert [event["index"] for event in tokens] == list(range(1, len(tokens) + 1))
    assert len(tokens) > 50
    assert error["error_type"] == "generation"
    assert error["error"].startswith("Request failed during generation: ")


def test_too_many_calls_are_429_and_readers_that_vanish_free_their_rows(client: Client, server: Server) -> None:
    streams = [client.connect() for _ in range(MAX_INPUTS)]
    body = json.dumps({"inputs": "ab", "parameters": {"max_new_tokens": MAX_NEW}})
    os.kill(server.engine_pid(), signal.SIGSTOP)
    try:
        for stream in streams:
            stream.request("POST", "/generate_stream", body, {"Content-Type": "application/json"})
        server.wait_for_metric(f"tgi_queue_size {MAX_INPUTS}.0")
        status, headers, content = client.ask("/generate", "ab", max_new_tokens=1)
        assert (status, json.loads(content)) == (429, {"error": "Model is overloaded", "error_type": "overloaded"})
        assert int(headers["retry-after"]) >= 1
        for stream in streams:
            stream.close()
        server.wait_for_metric("tgi_queue_size 0.0")
    finally:
        os.kill(server.engine_pid(), signal.SIGCONT)
    assert client.json("/generate", "ab", max_new_tokens=1) == {"generated_text": "a"}


def test_the_document_describes_every_route(client: Client, server: Server) -> None:
    document = client.json("/openapi.json")
    assert client.json("/api-doc/openapi.json") == document
    assert document["openapi"] == "3.1.0"
    assert {"/", "/generate", "/generate_stream", "/tokenize", "/info"} <= document["paths"].keys()
    fields = document["components"]["schemas"]["GenerateParameters"]["properties"]
    assert fields["top_p"]["anyOf"][0] == {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}
    events = document["paths"]["/generate_stream"]["post"]["responses"]["200"]["content"]["text/event-stream"]["schema"]
    (data,) = events["properties"]["data"]["anyOf"]
    names = [schema["$ref"].rpartition("/")[2] for schema in data["contentSchema"]["anyOf"]]
    assert names == ["StreamResponse", "ErrorResponse"]
    refs = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document)))
    assert refs == document["components"]["schemas"].keys()
    status, headers, page = client.ask("/docs")
    assert status == 200
    assert re.fullmatch(r"default-src 'none'; .*; style-src 'sha256-[^' ]+'", headers["content-security-policy"])
    assert not re.search(rb"<script|<link|src=|https?://", page)
    assert all(f" {path}</code>".encode() in page for path in document["paths"])


def test_a_stream_may_finish_while_the_server_drains(tmp_path: Path) -> None:
    with running_fake(tmp_path, {"step_seconds": 0.02}) as running, closing(Client(running).connect()) as connection:
        body = json.dumps({"inputs": "ab", "parameters": {"max_new_tokens": 30}})
        connection.request("POST", "/generate_stream", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        assert answer.readline().startswith(b"data: ")
        running.process.send_signal(signal.SIGTERM)
        assert answer.read().count(b"data: ") == 29
        assert running.process.wait(30) == 0
    assert "ERROR" not in running.log.read_text()


@given(
    value=st.floats(width=32, min_value=-1024, max_value=-(2**-100)),
    share=st.sampled_from([0, 0.4999999, 0.5, 0.5000001]),
)
@example(value=-0.3, share=0.5)
def test_numbers_are_the_shortest_of_single_precision(value: float, share: float) -> None:
    """Those between two of them, too: numpy says which."""
    between = value + share * float(np.spacing(np.float32(value)))
    assert json_float(between) == float(str(np.float32(between)))


def test_refused_bodies_are_counted(client: Client, server: Server) -> None:
    def counts() -> list[float]:
        text = client.ask("/metrics")[2].decode()
        names = [f'tgi_request_count_total{{kind="{kind}"}}' for kind in ("single", "stream")]
        names.append('tgi_request_failure_total{err="validation"}')
        lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        return [float(lines.get(name, 0)) for name in names]

    before = counts()
    for path, body in (("/generate", b"{"), ("/generate", {"inputs": 1}), ("/v1/completions", {"prompt": []})):
        assert client.ask(path, body)[0] in (400, 422)
    assert client.ask("/generate_stream", "a", max_new_tokens=-1)[0] == 422  # checked by TGI's rules
    assert client.ask("/generate", "a", max_new_tokens=9999)[0] == 422  # by the generator
    assert client.ask("/tokenize", b"{")[0] == 400  # generates nothing
    assert [after - old for after, old in zip(counts(), before, strict=True)] == [4, 1, 5]


def test_calls_beyond_the_grace_period_are_told(tmp_path: Path) -> None:
    with running_fake(tmp_path, {"step_seconds": 0.02}, SHUTDOWN_GRACE_SECONDS=0.3) as running, ExitStack() as opened:
        bodies = {
            "/generate": {"inputs": "ab", "parameters": {"max_new_tokens": 1000}},
            "/v1/completions": {"prompt": "ab", "max_tokens": 1000},
            "/generate_stream": {"inputs": "ab", "parameters": {"max_new_tokens": 1000}},
            "/v1/completions/": {"prompt": "ab", "max_tokens": 1000, "stream": True},
        }
        asked = [opened.enter_context(closing(Client(running).connect())) for _ in bodies]
        for connection, (path, body) in zip(asked, bodies.items(), strict=True):
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        running.wait_for_metric("tgi_batch_current_size 4.0")
        running.process.send_signal(signal.SIGTERM)
        *unary, plain, stream = [connection.getresponse() for connection in asked]
        for answer in unary:
            assert (answer.status, answer.headers["Retry-After"], answer.headers["Connection"]) == (503, "1", "close")
            assert b"the server is shutting down" in answer.read()
        *_, last, end = plain.read().split(b"\n\n")
        assert (last, end) == (b'data: {"error":"the server is shutting down","error_type":"unavailable"}', b"")
        *_, error, done, end = stream.read().split(b"\n\n")
        assert json.loads(error.removeprefix(b"data: "))["error"]["message"] == "the server is shutting down"
        assert (done, end) == (b"data: [DONE]", b"")
        assert running.process.wait(30) == 0


def test_clients_that_ask_again_at_once_do_not_prolong_the_end(tmp_path: Path) -> None:
    grace, refusals = 25, list[tuple[int, str | None, str | None]]()

    def ask(running: Server) -> None:
        with closing(Client(running).connect()) as connection, suppress(OSError, http.client.HTTPException):
            while True:
                connection.request("POST", "/generate", b'{"inputs":"a"}', {"Content-Type": "application/json"})
                with connection.getresponse() as answer:
                    answer.read()
                if answer.status != 200:
                    refusals.append((answer.status, answer.headers["Retry-After"], answer.headers["Connection"]))

    with running_fake(tmp_path, SHUTDOWN_GRACE_SECONDS=grace) as running, ThreadPoolExecutor(8) as threads:
        for _ in range(8):
            threads.submit(ask, running)
        time.sleep(0.5)  # in which they have begun
        running.process.send_signal(signal.SIGTERM)
        started = time.monotonic()
        assert running.process.wait(grace + 20) == 0
        assert time.monotonic() - started < grace - 5
    assert set(refusals) == {(503, "1", "close")}
