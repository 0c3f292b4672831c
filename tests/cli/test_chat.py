"""`tgis chat` with a server whose engine repeats its prompt, which is the whole chat."""

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from local_server import LocalServer, local_server

from tgis import __main__
from tgis.cli import client, sampling
from tgis.cli.chat import Chat, _delta, _parser, main
from tgis.cli.client import NO_API
from tgis.errors import StartError

TEMPLATE = "{% for message in messages %}{{ message.role[0] }}:{{ message.content }} {% endfor %}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    directory = tmp_path_factory.mktemp("chat")
    options = {"SERVED_MODEL_NAME": "m", "DEBUG_BATCH": True, "RECORD_PATH": directory / "records"}
    with local_server(directory, {"step_seconds": 0.005}, TEMPLATE, **options) as running:
        yield running


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def chat(server: LocalServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command with lines on stdin; exit code, stdout, stderr."""

    def run(lines: str, *options: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        code = __main__.run(["chat", "--target", f"localhost:{server.http_port}", *options])
        return code, *capsys.readouterr()

    return run


def test_lines_are_messages_of_one_chat_until_it_is_reset(chat: Run) -> None:
    first, reset = ("s:be u:ab " * 4)[:30], ("s:be u:ef " * 4)[:30]
    second = f"s:be u:ab a:{first} u:cd "[:30]
    said = chat(" ab \ncd\n\n/reset\nef\n", "--max-tokens", "30", "--system", "be")
    assert said == (0, f"{first}\n{second}\n{reset}\n", "")


def test_the_sampling_options_are_those_of_generate(server: LocalServer, chat: Run, tmp_path: Path) -> None:
    options = "--temperature 0.5 --top-k 3 --top-p 0.9 --min-p 0.1 --seed 7 --allow-token-id 97 --bad-word x"
    options += " --repetition-penalty 1.5 --frequency-penalty 0.5 --presence-penalty -1"
    chat("ab\n", "--max-tokens", "3", *options.split())
    generate = ["generate", "--target", server.target, "--record", str(tmp_path / "record"), "ab"]
    assert __main__.run([*generate, "--max-new-tokens", "3", *options.split()]) == 0
    records = (server.log.parent / "records").read_bytes().splitlines()[-1], (tmp_path / "record").read_bytes()
    chatted, generated = (json.loads(record)["parameters"] for record in records)
    assert chatted == generated


def test_a_refusal_is_one_line(server: LocalServer, chat: Run) -> None:
    code, out, err = chat("x" * 5000)
    (line,) = err.splitlines()
    assert (code, out, "2048" in line) == (1, "", True)
    assert line.startswith(f"tgis: localhost:{server.http_port}: ")


@pytest.mark.parametrize(
    ("line", "outcome"),
    [
        (b"", (False, "")),
        (
            b'data: {"choices": [{"delta": {"reasoning": "a", "content": null}}, {"delta": {"content": "b"}}]}',
            (True, "b"),
        ),
        (b'data: {"error": {"message": "why"}}', "why"),
        (b'data: {"error": "why"}', "why"),
        (b'data: {"error": {}}', NO_API),
    ],
)
def test_the_line_of_a_stream(line: bytes, outcome: tuple[bool, str] | str) -> None:
    if isinstance(outcome, tuple):
        assert _delta(line) == outcome
    else:
        with pytest.raises(StartError, match=f"^{re.escape(outcome)}$"):
            _delta(line)


def test_a_terminal_shows_that_the_model_thinks_and_no_thought(monkeypatch: Any, capsys: Any) -> None:
    sent = list[Any]()

    def http_call(_options: Any, _path: str, body: Any, timeout: float | None) -> Iterator[bytes]:
        sent.append((body, timeout))
        if body and body["messages"][-1]["content"] == "z":
            raise StartError("it is refused")
        deltas = [{"reasoning": "a"}, {"reasoning": "b"}, {"content": "c\x1b"}, {"content": "d"}] if body else []
        yield from [b"data: " + json.dumps({"choices": [{"delta": delta}]}).encode() for delta in deltas]
        yield b"" if body else b'{"data": [{"id": "m"}]}'

    monkeypatch.setattr(client, "http_call", http_call)
    Chat(_parser("").parse_args([])).read("x")
    assert (capsys.readouterr().out, sent[0][1], sent.pop()[1]) == ("c\x1bd\n", client.UNARY_TIMEOUT_SECONDS, None)
    monkeypatch.setattr(sys, "stdin", io.StringIO("x\nz\ny\n"))
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    assert main(["--timeout", "7", "--model", "a"], "tgis chat") == 0
    banner = "a: Ctrl-C stops an answer, /reset forgets the chat, Ctrl-D leaves\n"
    shown = "> (thinking)\nc\ufffdd\n> > (thinking)\nc\ufffdd\n> \n"
    assert capsys.readouterr() == (shown, f"{banner}\ntgis: it is refused\n")
    said = ("user", "x"), ("assistant", "c\x1bd"), ("user", "y")
    messages = [{"role": role, "content": text} for role, text in said]
    body = dict.fromkeys(("max_tokens", *sampling.FIELDS)) | {"model": "a", "messages": messages, "stream": True}
    assert (sent[1], sent[-1]) == ((None, 7), (body, 7))


def test_on_a_terminal_an_answer_can_be_stopped(server: LocalServer) -> None:
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "tgis", "chat", "--target", f"localhost:{server.http_port}"]
    environ = os.environ | {"TERM": "dumb", "PYTHONUNBUFFERED": ""}
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environ) as process:
        os.close(theirs)
        seen = ""

        def until(text: str) -> None:
            nonlocal seen
            while text not in seen:
                seen += os.read(ours, 4096).decode()

        until("m: Ctrl-C stops an answer, /reset forgets the chat, Ctrl-D leaves\r\n> ")
        os.write(ours, b"hello\x1b[31m\n")
        until("u:hello")
        assert server.metric("tgi_batch_current_size") == 1.0  # it is shown as it grows
        process.send_signal(signal.SIGINT)
        server.wait_for_metric("tgi_batch_current_size 0.0")
        seen = seen[seen.index("u:hello") :]
        until("\n> ")
        assert "\x1b[31m" not in seen  # the model's text cannot command the terminal
        seen = ""
        os.write(ours, b"\x04")
        until("\r\n")  # the shell's prompt begins a line
        assert process.wait(20) == 0
    os.close(ours)
