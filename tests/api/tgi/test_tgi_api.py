"""TGI's REST API: a server in this process with the fake engine, which repeats its prompt."""

import http.client
import json
import re
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from chat_templates import write_template
from local_server import LocalServer, local_server
from repository import REPOSITORY
from tables import table
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from demo.fake_model import make_fake_model
from tgis import __version__

MAX_LENGTH, MAX_NEW = 200, 150


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    steps = {"max_sequence_length": MAX_LENGTH, "step_seconds": 0.002, "memory_tokens": MAX_LENGTH - 20}
    options = {"MAX_CONCURRENT_REQUESTS": 8, "MAX_INPUT_TOKENS": 160, "PAYLOAD_LIMIT": 100_000}
    options |= {"MAX_NEW_TOKENS": MAX_NEW, "DEBUG_BATCH": True}
    with local_server(tmp_path_factory.mktemp("tgi"), steps, **options) as running:
        yield running


def connect(server: LocalServer, path: str, body: Any) -> http.client.HTTPConnection:
    """A connection over which the body has been sent."""
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=30)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    return connection


def post(server: LocalServer, path: str, inputs: str, **parameters: Any) -> tuple[int, Any]:
    return server.post(path, {"inputs": inputs, "parameters": parameters})


def events(stream: bytes) -> list[Any]:
    *parts, end = stream.split(b"\n\n")
    assert end == b""
    return [json.loads(part.removeprefix(b"data: ")) for part in parts if part != b"data: [DONE]"]


def test_the_bytes_of_a_stream(server: LocalServer) -> None:
    given = {"max_new_tokens": 20, "details": True, "top_n_tokens": 2, "do_sample": True, "seed": 7}
    with closing(connect(server, "/generate_stream", {"inputs": "hé</s>", "parameters": given})) as connection:
        answer = connection.getresponse()
        assert (answer.status, answer.read()) == (200, (REPOSITORY / "tests/golden/generate_stream.sse").read_bytes())
    expected = {"content-type": "text/event-stream", "cache-control": "no-cache", "x-accel-buffering": "no"}
    expected |= {"x-compute-type": "1-none", "x-compute-characters": "6"}
    assert {name: answer.headers[name] for name in expected} == expected


GRAMMAR: Any = {"type": "json", "value": {"enum": ["abc", 17]}}


@table("answers", "ends of tgi")
def test_ends(server: LocalServer, row: dict[str, Any]) -> None:
    inputs, parameters, number = row["inputs"], row["parameters"], row["number"]
    _, answer = post(server, "/generate", inputs, details=True, **parameters)
    _, stream = post(server, "/generate_stream", inputs, details=True, **parameters)
    last = events(stream.encode())[-1]
    for whole in (answer, last):
        assert whole["generated_text"] == row["text"]
        assert (whole["details"]["finish_reason"], whole["details"]["generated_tokens"]) == (row["reason"], number)
    assert last["index"] == number


def test_tokenize(server: LocalServer) -> None:
    _, tokens = post(server, "/tokenize", "a é</s>", truncate=1)
    spans = [(token["start"], token["stop"], token["text"]) for token in tokens]
    assert spans == [(0, 1, "a"), (1, 2, " "), (2, 4, "é"), (2, 4, "é"), (4, 8, "</s>")]
    assert tokens[-1]["id"] == 256
    assert len(post(server, "/tokenize", "a" * 7_000)[1]) == 7_000
    for length, text in ((9_000, "the reply has more than 400000 bytes"), (90_000, "the text has more than ")):
        status, answer = post(server, "/tokenize", "a" * length)
        assert (status, text in answer["error"]) == (422, True)
    assert post(server, "/generate", "a" * 100, max_new_tokens=150)[0] == 422  # more than fit
    assert server.post("/tokenize", {"prompt": "a" * 50_000})[1]["count"] == 50_000
    assert server.post("/tokenize", {"prompt": "a" * 50_001})[0] == 422
    chat = {"messages": [{"role": "user", "content": "a"}]}
    assert server.post("/chat_tokenize", chat)[1]["error"] == "Template error: the model has no chat template"


def test_info(server: LocalServer) -> None:
    info = json.loads(server.get("/info")[1])
    fingerprint = info.pop("fingerprint")
    assert re.fullmatch("fp_[0-9a-f]{12}", fingerprint)
    assert f'fingerprint="{fingerprint}"' in server.get("/metrics")[1]
    assert server.post("/v1/completions", {"prompt": "a"})[1]["system_fingerprint"] == fingerprint
    expected = {"router": "tgis", "model_dtype": "none", "model_device_type": "none", "max_total_tokens": MAX_LENGTH}
    expected |= {"max_input_tokens": 160, "max_input_length": 160, "max_concurrent_requests": 8, "max_batch_size": 256}
    expected |= {"max_best_of": 2, "max_stop_sequences": 4, "max_batch_total_tokens": 1 << 40, "max_waiting_tokens": 24}
    expected |= {"model_id": "model", "max_client_batch_size": 4, "validation_workers": 2, "version": __version__}
    unknown = dict.fromkeys(("model_sha", "model_pipeline_tag", "docker_label", "sha"))
    assert info == expected | unknown
    assert json.loads(server.get("/debug/batch")[1])["max_batch_size"] == 256


def test_a_failure_amid_a_stream_is_an_event(server: LocalServer) -> None:
    _, stream = post(server, "/generate_stream", "x" * 100, max_new_tokens=90)  # memory runs out
    *tokens, error = events(stream.encode())
    assert [event["index"] for event in tokens] == list(range(1, len(tokens) + 1))
    assert len(tokens) > 50
    assert error["error"].startswith("Request failed during generation: ")


def test_refused_bodies_are_counted(server: LocalServer) -> None:
    names = [f'tgi_request_count_total{{kind="{kind}"}}' for kind in ("single", "stream")]
    names.append('tgi_request_failure_total{err="validation"}')
    before = server.metrics(*names)
    single: Any = ("/generate", b"{"), ("/generate", {"inputs": 1}), ("/v1/completions", {"prompt": []})
    for path, body in (*single, ("/generate_stream", b"{")):
        assert server.post(path, body)[0] in (400, 422)
    assert post(server, "/generate_stream", "a", best_of=2)[0] == 422  # by TGI's rules
    assert post(server, "/generate", "a", max_new_tokens=9999)[0] == 422  # by the generator
    for path in ("/tokenize", "/chat_tokenize", "/detokenize"):  # generate nothing
        assert server.post(path, b"{")[0] == 400
    assert [after - old for after, old in zip(server.metrics(*names), before, strict=True)] == [4, 2, 6]


def test_calls_beyond_the_grace_period_are_told(tmp_path: Path) -> None:
    generate = {"inputs": "ab", "parameters": {"max_new_tokens": 1000}}
    bodies = {"/generate": generate, "/v1/completions": {"prompt": "ab", "max_tokens": 1000}}
    bodies |= {"/generate_stream": generate, "/v1/completions/": {"prompt": "ab", "max_tokens": 1000, "stream": True}}
    with local_server(tmp_path, {"step_seconds": 0.02}, SHUTDOWN_GRACE_SECONDS=0.1) as running, ExitStack() as opened:
        asked = [opened.enter_context(closing(connect(running, *request))) for request in bodies.items()]
        running.wait_for_metric("tgi_batch_current_size 4.0")
        running.begin_stop()
        *unary, plain, stream = [connection.getresponse() for connection in asked]
        for answer in unary:
            assert (answer.status, answer.headers["Retry-After"], answer.headers["Connection"]) == (503, "1", "close")
            assert b"the server is shutting down" in answer.read()
        assert events(plain.read())[-1] == {"error": "the server is shutting down", "error_type": "unavailable"}
        text = stream.read()
        assert events(text)[-1]["error"]["message"] == "the server is shutting down"
        assert text.endswith(b"data: [DONE]\n\n")


def test_options_that_only_tgi_has(tmp_path: Path) -> None:
    """The tokenizer, with one token more, and the chat template are those of another directory."""
    other = make_fake_model(tmp_path / "other")
    write_template(other, "{{ messages[0].content }}!")
    tokenizer = Tokenizer.from_file(f"{other}/tokenizer.json")
    tokenizer.add_tokens(["abc"])
    tokenizer.post_processor = TemplateProcessing(single="</s> $A", special_tokens=[("</s>", 256)])
    tokenizer.save(f"{other}/tokenizer.json")
    options = {"TOKENIZER_NAME": other, "DISABLE_GRAMMAR_SUPPORT": True, "MAX_STOP_SEQUENCES": 1}
    with local_server(tmp_path, **options) as running:
        assert [token["text"] for token in running.post("/tokenize", {"inputs": "xabc"})[1]] == ["", "x", "abc"]
        chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
        assert len(running.post("/chat_tokenize", chat)[1]["tokenize_response"]) == 2  # its template writes them
        for body, count in (({"prompt": "abc"}, 2), ({"prompt": "abc", "add_special_tokens": False}, 1), (chat, 2)):
            assert running.post("/tokenize", body)[1]["count"] == count
        assert running.post("/v1/chat/completions", chat)[1]["choices"][0]["message"]["content"] == "x!x!"
        status, answer = post(running, "/generate", "a", grammar=GRAMMAR)
        assert (status, answer["error"].partition(" is turned off ")[2]) == (422, "(STRUCTURED_OUTPUT)")
        assert post(running, "/generate", "a", stop=["b"])[0] == 200
        assert post(running, "/generate", "a", stop=["b", "c"])[0] == 422
