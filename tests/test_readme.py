"""Runs the README's examples as they are, except for the port, against a real server."""

import html
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_hub
import grpc
import numpy as np
import pytest
from google.protobuf import descriptor_pool, json_format, message_factory
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from harness import Server, running_fake, unary_request
from repository import REPOSITORY
from safetensors.numpy import save

ADDRESS = "localhost:8033"
README = (REPOSITORY / "README.md").read_text()
COMMANDS = [
    shlex.split(line, comments=True)
    for block in re.findall(r"(?:^    .*\n)+", README, re.MULTILINE)
    for line in block.replace("\\\n", " ").splitlines()
]
CURL = [words[1:] for words in COMMANDS if words[0] == "curl"]
GRPCURL = [words[1:] for words in COMMANDS if words[0] == "grpcurl"]
TGIS = [words[1:] for words in COMMANDS if words[0] == ".venv/bin/tgis"]
PYTHON = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_fake(tmp_path_factory.mktemp("readme"), {}, "{{ messages[0]['content'] }}") as running:
        yield running


def test_the_readme_has_examples() -> None:
    assert CURL
    assert GRPCURL
    assert TGIS
    assert PYTHON


@pytest.mark.parametrize("example", PYTHON)
def test_python_example(server: Server, example: str) -> None:
    assert ADDRESS in example
    (prompt,) = re.findall(r'text="(.*?)"', example)
    (count,) = map(int, re.findall(r"max_new_tokens=(\d+)", example))
    assert _printed("-c", example.replace(ADDRESS, server.target)) == _text(server, prompt, count)


@pytest.mark.parametrize("words", [words for words in TGIS if words[0] == "download-weights"], ids=shlex.join)
def test_download_example(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with fake_hub.running() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        files = dict.fromkeys(("config.json", "tokenizer.json"), b"{}")
        commit = hub.add(words[1], files | {"model.safetensors": save({"w": np.zeros(1)})})
        printed = _printed("-m", "tgis", *words)
    assert printed.startswith(str(tmp_path))
    assert printed.endswith(f"{commit}\n")
    assert f"MODEL_NAME={words[1]} .venv/bin/tgis serve\n" in README


@pytest.mark.parametrize("words", [words for words in TGIS if words[0] != "download-weights"], ids=shlex.join)
def test_command_example(server: Server, words: list[str]) -> None:
    command, *rest = words
    if command == "chat":
        printed = _printed("-m", "tgis", "chat", "--target", f"localhost:{server.http_port}", *rest, input="ab\n")
        assert printed.startswith("abab")
        return
    assert command == "generate"
    assert _printed("-m", "tgis", command, "--target", server.target, *rest) == _text(server, rest[0], 20)


@pytest.mark.parametrize("words", GRPCURL, ids=shlex.join)
def test_grpcurl_example(server: Server, words: list[str]) -> None:
    flags, (address, method) = words[:-2], words[-2:]
    assert address == ADDRESS
    assert [flags[0], flags[1]] == ["-plaintext", "-d"]
    (answer,) = _grpcurl(server.target, flags[2], method)
    asked = json.loads(flags[2])
    wanted = [_text(server, one["text"], asked["params"]["stopping"]["max_new_tokens"]) for one in asked["requests"]]
    assert [one["text"] for one in answer["responses"]] == wanted


@pytest.mark.parametrize("words", CURL, ids=shlex.join)
def test_curl_example(server: Server, words: list[str]) -> None:
    url, header_flag, header, data_flag, data = words
    assert url.startswith("localhost:3000/v1/")
    assert (header_flag, data_flag) == ("-H", "-d")
    assert header == "Content-Type: application/json"
    _, answer = server.post(url.removeprefix("localhost:3000"), data.encode())
    assert answer["choices"][0]["message"]["content"]


def test_every_operation_has_a_sentence_and_an_example_that_runs(server: Server) -> None:
    page, document = server.get("/docs")[1], json.loads(server.get("/openapi.json")[1])
    operations = [each for methods in document["paths"].values() for each in methods.values()]
    assert operations
    assert not [operation["summary"] for operation in operations if f"<p>{operation['summary']}</p>" in page]
    commands = [html.unescape(each) for each in re.findall(r"<pre>(.*?)</pre>", page, re.DOTALL)]
    assert len(commands) == len(operations)
    for command in commands:
        _, address, *flags = shlex.split(command)
        host, slash, path = address.partition("/")
        assert host == f"localhost:{server.http_port}"
        body = flags[flags.index("-d") + 1].encode() if flags else None
        status, answer = server.get(slash + path) if body is None else server.post(slash + path, body)
        assert (status, bool(answer)) == (200, True), command


def _grpcurl(target: str, data: str, name: str) -> list[dict[str, list[dict[str, str]]]]:
    """Call as grpcurl does, with descriptors from reflection only; the responses as protobuf JSON."""
    service, _, method_name = name.partition("/")
    with grpc.insecure_channel(target) as channel:
        pool = descriptor_pool.DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
        method = pool.FindServiceByName(service).methods_by_name[method_name]
        request = json_format.Parse(data, message_factory.GetMessageClass(method.input_type)(), descriptor_pool=pool)
        answer = message_factory.GetMessageClass(method.output_type)
        make = channel.unary_stream if method.server_streaming else channel.unary_unary
        found: Any = make(f"/{name}", lambda message: message.SerializeToString(), answer.FromString)(
            request, timeout=30
        )
        messages = list(found) if method.server_streaming else [found]
        return [json_format.MessageToDict(message) for message in messages]


def _printed(*arguments: str, input: str = "") -> str:  # noqa: A002 - as subprocess
    environ = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(
        [sys.executable, *arguments],
        env=environ,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        input=input,
    ).stdout


def _text(server: Server, prompt: str, max_new_tokens: int) -> str:
    with server.stub() as stub:
        (response,) = stub.Generate(unary_request(prompt, max_new_tokens), timeout=30).responses
    assert response.text
    text: str = response.text
    return text
