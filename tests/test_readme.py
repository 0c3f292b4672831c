"""What the README downloads, from a stand-in of the hub; the examples of /docs, against a real server."""

import html
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import fake_hub
import numpy as np
import pytest
from harness import running_fake
from repository import REPOSITORY
from safetensors.numpy import save


def test_the_model_of_the_readme_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readme = (REPOSITORY / "README.md").read_text()
    (name,) = re.findall(r"^\.venv/bin/tgis download-weights (\S+)$", readme, re.MULTILINE)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with fake_hub.running() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        files = dict.fromkeys(("config.json", "tokenizer.json"), b"{}")
        commit = hub.add(name, files | {"model.safetensors": save({"w": np.zeros(1)})})
        command = [sys.executable, "-m", "tgis", "download-weights", name]
        printed = subprocess.check_output(command, cwd=REPOSITORY, text=True, timeout=60)
    assert printed.startswith(str(tmp_path))
    assert printed.endswith(f"{commit}\n")
    assert f"MODEL_NAME={name} .venv/bin/tgis serve\n" in readme


def test_every_operation_has_a_sentence_and_an_example_that_runs(tmp_path: Path) -> None:
    with running_fake(tmp_path, {}, "{{ messages[0]['content'] }}") as server:
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
