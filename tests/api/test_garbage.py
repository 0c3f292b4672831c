"""Calls leave no reference cycles, however they end: what they held would stay until the next collection."""

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path
from threading import Event
from typing import Any

import grpc
import pytest
from garbage_server import collected
from harness import Server, as_stream_request, running_module, unary_request
from repository import REPOSITORY, python_path

from demo.fake_model import make_fake_model
from tgis.pb import generation_pb2 as pb
from tgis.pb.generation_pb2_grpc import GenerationServiceStub

CALLS = 3  # of each kind
SERVICE = "fmaas.GenerationService"
MAX_LENGTH, LONG, MAX_BODY = 400, 300, 50_000
POISON = "a!"  # token 0
TEMPLATE = """
{%- if messages[0].content == "refused" %}{{ raise_exception("not this") }}{% endif %}
{%- for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"""


class Clients:
    """The clients of a server that can say what it leaves to the collector."""

    def __init__(self, server: Server, report: Path) -> None:
        self.server, self.report = server, report
        self.channel = grpc.insecure_channel(server.target)
        self.stub = GenerationServiceStub(self.channel)

    def collected(self) -> dict[str, int]:
        """Since it was last asked, of calls that have ended."""
        self.server.wait_for_metric("tgi_batch_current_size 0.0")
        self.generate("a")
        return collected(self.server.process.pid, self.report)

    def generate(self, *texts: str, tokens: int = 5, timeout: float = 20) -> None:
        self.start(*texts, tokens=tokens, timeout=timeout).result()

    def start(self, *texts: str, tokens: int = LONG, timeout: float = 20) -> Any:
        request = unary_request(texts[0], tokens)
        request.requests.extend(pb.GenerationRequest(text=text) for text in texts[1:])
        return self.stub.Generate.future(request, timeout=timeout)

    def stream(self, text: str = "ab", tokens: int = LONG, timeout: float = 20) -> Any:
        return self.stub.GenerateStream(as_stream_request(unary_request(text, tokens)), timeout=timeout)

    def with_regex(self, regex: str) -> None:
        request = unary_request("ab")
        request.params.decoding.regex = regex
        self.stub.Generate(request)

    def send(self, method: str, *messages: bytes) -> None:
        list(self.channel.stream_stream(f"/{method}", bytes, bytes)(iter(messages)))

    def post(self, path: str, body: dict[str, Any] | bytes, kind: str = "application/json") -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        with closing(HTTPConnection("127.0.0.1", self._api_port, timeout=20)) as connection:
            connection.request("POST", path, data, {"Content-Type": kind})
            connection.getresponse().read()

    def post_and_vanish(self, path: str, body: dict[str, Any], missing: int = 0, *, reads: bool = False) -> None:
        """Before `missing` bytes are sent, or while the server generates."""
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: [::]\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
        with closing(self.connect(f"{head}\r\n\r\n".encode() + data[: len(data) - missing])) as connection:
            if reads:
                connection.recv(1)
            elif not missing:
                self.server.wait_for_metric("tgi_batch_current_size 1.0")

    def send_line(self, line: bytes) -> None:
        with closing(self.connect(line)) as connection:
            connection.recv(1)

    def connect(self, data: bytes) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self._api_port), timeout=20)
        connection.sendall(data)
        return connection

    @property
    def _api_port(self) -> int:
        assert self.server.api_port is not None
        return self.server.api_port


Kind = Callable[[Clients], object]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = make_fake_model(tmp_path_factory.mktemp("model"), MAX_LENGTH, step_seconds=0.02, poison_token=0)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    return model


@contextmanager
def serving(directory: Path, model: Path, **options: Any) -> Iterator[Clients]:
    options |= {"MAX_NEW_TOKENS": LONG, "MAX_CONCURRENT_REQUESTS": 8, "PAYLOAD_LIMIT": MAX_BODY}
    options["PYTHONPATH"] = python_path(REPOSITORY, REPOSITORY / "tests/support")
    command = ["garbage_server", str(directory / "report")]
    with running_module(command, directory, MODEL_NAME=model, DEPLOYMENT_FRAMEWORK="fake", **options) as server:
        made = Clients(server, directory / "report")
        collected(server.process.pid, made.report)  # of the start
        yield made
        made.channel.close()


@pytest.fixture(scope="module")
def clients(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clients]:
    with serving(tmp_path_factory.mktemp("garbage"), model) as made:
        yield made


def _cancel_a_unary_call(clients: Clients) -> None:
    call = clients.start("ab", "c")
    clients.server.wait_for_metric("tgi_batch_current_size 2.0")
    call.cancel()


def _cancel_a_stream(clients: Clients) -> None:
    call = clients.stream()
    next(call)
    call.cancel()


def _cancel_at_once(clients: Clients) -> None:
    for call in (clients.start("ab"), clients.stream()):
        call.cancel()


def _cancel_before_the_message(clients: Clients) -> None:
    cancelled = Event()
    call: Any = clients.channel.stream_stream(f"/{SERVICE}/GenerateStream", bytes, bytes)(
        iter(lambda: cancelled.wait() and b"", b"")
    )
    clients.generate("a")
    call.cancel()
    cancelled.set()


def _vanish(clients: Clients) -> None:
    with grpc.insecure_channel(clients.server.target, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        call = GenerationServiceStub(channel).GenerateStream(as_stream_request(unary_request("ab", LONG)))
        next(call)


GRPC: dict[str, Kind] = {
    "finished": lambda to: to.generate("a", "b"),
    "finished stream": lambda to: list(to.stream(tokens=5)),
    "finished grammar": lambda to: to.with_regex("[ab]+"),
    "tokenized": lambda to: to.stub.Tokenize(pb.BatchedTokenizeRequest(requests=[pb.TokenizeRequest(text="a")] * 20)),
    "failed": lambda to: to.generate(POISON),
    "failed in a batch": lambda to: to.generate("a", POISON, "b"),
    "failed stream": lambda to: list(to.stream(POISON)),
    "late": lambda to: to.generate("a", tokens=LONG, timeout=0.1),
    "late stream": lambda to: list(to.stream(timeout=0.1)),
    "cancelled": _cancel_a_unary_call,
    "cancelled stream": _cancel_a_stream,
    "cancelled at once": _cancel_at_once,
    "cancelled before its message": _cancel_before_the_message,
    "vanished": _vanish,
    "refused parameters": lambda to: to.generate("a", tokens=LONG + 1),
    "refused stream": lambda to: list(to.stream(tokens=LONG + 1)),
    "too long": lambda to: to.generate("a", "b" * MAX_LENGTH),
    "not decoded": lambda to: to.send(f"{SERVICE}/Generate", b"\xff"),
    "without a message": lambda to: to.send(f"{SERVICE}/GenerateStream"),
    "no grammar": lambda to: to.with_regex("("),
    "no service": lambda to: to.send("grpc.health.v1.Health/Check", b"\x0a\1x"),
    "too many texts": lambda to: to.send(f"{SERVICE}/Tokenize", b"\x12\0" * 100_000),
}


def tgi(text: str, tokens: int = 5, **parameters: Any) -> dict[str, Any]:
    return {"inputs": text, "parameters": {"max_new_tokens": tokens, **parameters}}


HTTP: dict[str, Kind] = {
    "finished": lambda to: to.post("/generate", tgi("a", best_of=2, do_sample=True)),
    "finished stream": lambda to: to.post("/generate_stream", tgi("a")),
    "failed": lambda to: to.post("/generate", tgi(POISON)),
    "failed stream": lambda to: to.post("/generate_stream", tgi(POISON)),
    "vanished": lambda to: to.post_and_vanish("/generate", tgi("a", LONG)),
    "vanished stream": lambda to: to.post_and_vanish("/generate_stream", tgi("a", LONG), reads=True),
    "vanished with half a body": lambda to: to.post_and_vanish("/generate", tgi("a"), missing=3),
    "refused parameters": lambda to: to.post("/generate", tgi("a", LONG + 1)),
    "refused stream": lambda to: to.post("/generate_stream", tgi("a", LONG + 1)),
    "wrong type": lambda to: to.post("/generate", {"inputs": 1}),
    "no JSON": lambda to: to.post("/generate", b"{"),
    "large body": lambda to: to.post("/generate", b" " * (MAX_BODY + 1)),
    "wrong content type": lambda to: to.post("/generate", b"{}", kind="text/plain"),
    "no grammar": lambda to: to.post("/generate", tgi("a", grammar={"type": "regex", "value": "("})),
    "no route": lambda to: to.post("/nothing", {}),
    "no HTTP": lambda to: to.send_line(b"\0\r\n"),
}


def completion(prompt: Any, tokens: int = 5, **more: Any) -> dict[str, Any]:
    return {"model": "model", "prompt": prompt, "max_tokens": tokens, **more}


def chat(text: str, tokens: int = 5, **more: Any) -> dict[str, Any]:
    return {"model": "model", "messages": [{"role": "user", "content": text}], "max_tokens": tokens, **more}


COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
OPENAI: dict[str, Kind] = {
    "finished": lambda to: to.post(COMPLETIONS, completion(["a", "b"], logprobs=1)),
    "finished stream": lambda to: to.post(COMPLETIONS, completion("a", n=2, stream=True)),
    "finished chat": lambda to: to.post(CHAT, chat("a", response_format={"type": "json_object"})),
    "finished chat stream": lambda to: to.post(CHAT, chat("a", stream=True)),
    "failed": lambda to: to.post(COMPLETIONS, completion(["a", POISON, "b"])),
    "failed stream": lambda to: to.post(COMPLETIONS, completion(["a", POISON], stream=True)),
    "vanished": lambda to: to.post_and_vanish(COMPLETIONS, completion("a", LONG)),
    "vanished stream": lambda to: to.post_and_vanish(COMPLETIONS, completion("a", LONG, n=2, stream=True), reads=True),
    "vanished chat": lambda to: to.post_and_vanish(CHAT, chat("a", LONG, stream=True), reads=True),
    "refused parameters": lambda to: to.post(COMPLETIONS, completion("a", frequency_penalty=3.0)),
    "wrong type": lambda to: to.post(COMPLETIONS, completion(1)),
    "refused by the template": lambda to: to.post(CHAT, chat("refused")),
    "no schema": lambda to: to.post(CHAT, chat("a", tools=[{"type": "function", "function": {"name": "f"}}])),
}


KINDS = {"grpc": GRPC, "http": HTTP, "openai": OPENAI}


@pytest.mark.parametrize(("api", "kind"), [(api, kind) for api, kinds in KINDS.items() for kind in kinds])
def test_nothing_of_such_calls_is_left(clients: Clients, api: str, kind: str) -> None:
    for _ in range(CALLS):
        with suppress(grpc.RpcError):
            KINDS[api][kind](clients)
    assert clients.collected() == {}


def test_calls_without_a_token(model: Path, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("secret\n")
    with serving(tmp_path, model, AUTH_TOKEN_PATH=tmp_path / "tokens") as clients:
        for _ in range(CALLS):
            with pytest.raises(grpc.RpcError, match="a valid bearer token is required"):
                clients.generate("a")
            with pytest.raises(grpc.RpcError, match="a valid bearer token is required"):
                list(clients.stream())
            clients.post(COMPLETIONS, completion("a"))
        clients.server.get("/health")
        assert collected(clients.server.process.pid, clients.report) == {}
