"""`tgis serve` around the server: an unexpected error, the limit of open files, and `--check`, which starts nothing."""

import json
import logging
import os
import resource
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from demo.fake_model import make_fake_model
from tgis import __main__
from tgis.cli import serve
from tgis.config import Config
from tgis.errors import StartError
from tgis.utils import logs
from tgis.utils.options import declared_options


@pytest.mark.usefixtures("logging_as_before")
def test_an_unexpected_error_is_in_both_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(_config: Config) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(serve, "prepare_environment", fail)
    monkeypatch.setattr(serve, "raise_file_limit", limit := mock.Mock())
    (tmp_path / "termination").touch()
    paths = "--termination-log", str(tmp_path / "termination"), "--cache-dir", str(tmp_path)
    assert serve.main(["--model-name", "m", "--json-output", *paths], "tgis serve") == 1
    logs._streams[0].stop()
    (line,) = map(json.loads, capfd.readouterr().out.splitlines())
    assert (line["level"], line["message"]) == ("ERROR", "the server cannot go on")
    assert "ValueError: a bug" in line["exception"]
    assert (tmp_path / "termination").read_text() == "ValueError: a bug\n"
    limit.assert_called_once_with()
    monkeypatch.setattr(serve, "prepare_environment", mock.Mock(side_effect=StartError("no model")))
    assert serve.main(["--model-name", "m", "--json-output", *paths], "tgis serve") == 1
    logs._streams[0].stop()
    line = json.loads(capfd.readouterr().out)
    assert (line["level"], line["message"]) == ("CRITICAL", "no model")
    assert (tmp_path / "termination").read_text() == "no model\n"
    with pytest.raises(StartError, match="no model"):
        serve.main(["--model-name", "m", *paths], "tgis serve")
    monkeypatch.setenv("JSON_OUTPUT", " 1 ")
    assert serve.main([], "tgis serve") == 2
    logs._streams[0].stop()
    line = json.loads(capfd.readouterr().out)
    assert (line["level"], line["message"]) == ("CRITICAL", "MODEL_NAME is required (or pass --model-name)")


def test_the_soft_limit_is_raised_to_the_hard_one(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = len(os.listdir("/proc/self/fd")) + 100
    wanted = serve.MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, serve.MAX_OPEN_FILES)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (low, hard))
        for _ in range(2):
            serve.raise_file_limit()
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (wanted, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert [record.getMessage() for record in caplog.records] == [f"limit of open files raised from {low} to {wanted}"]


Check = Callable[..., tuple[int, list[str], str]]


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Check:
    """Runs the command for a model of the fake engine: exit code, lines of stdout, stderr."""
    monkeypatch.setattr(os, "environ", dict(os.environ))  # which a start changes
    monkeypatch.setattr(logging.root, "handlers", [])  # which a check replaces
    monkeypatch.setenv("CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TERMINATION_LOG", str(tmp_path / "log"))
    (tmp_path / "log").touch()
    model = str(make_fake_model(tmp_path / "model"))

    def run(*argv: str) -> tuple[int, list[str], str]:
        code = __main__.run(["serve", model, "--check", "--deployment-framework", "fake", *argv])
        out, err = capsys.readouterr()
        return code, out.splitlines(), err

    return run


def test_every_option_is_shown_with_what_set_it(check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUM_GPUS", "1")
    code, out, err = check("--max-batch-size", "32", "--json-output")
    assert (code, err) == (0, "")
    rows = {line.split()[0]: line.split()[1:] for line in out if line.startswith("  ")}
    assert list(rows) == [option.name.upper() for option in declared_options(Config)]
    assert rows["MODEL_NAME"] == [str(tmp_path / "model"), "--model-name"]
    assert rows["MAX_BATCH_SIZE"] == ["32", "--max-batch-size"]
    assert rows["JSON_OUTPUT"] == ["true", "--json-output"]
    assert rows["NUM_SHARD"] == ["1", "NUM_GPUS"]
    assert rows["GRPC_PORT"] == ["8033"]
    assert rows["MAX_SEQUENCE_LENGTH"] == ["from", "the", "model"]
    assert rows["CORS_ALLOW_ORIGIN"] == ["none"]
    assert out[-1].startswith("tgis can start with these options.")
    assert (tmp_path / "cache" / "tmp").is_dir()


def test_warnings_of_a_start_are_shown(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "describe_memory", lambda _options: ["a line about memory"])
    code, out, _ = check("--max-new-tokens", "5000", "--shard-uds-path", "x")
    assert code == 0
    assert out[-4:-1] == [
        "WARNING: ignored options: --shard-uds-path",
        "WARNING: MAX_NEW_TOKENS 5000 lowered to 2047, below MAX_SEQUENCE_LENGTH",
        "a line about memory",
    ]


def test_what_a_start_refuses_is_refused(check: Check, tmp_path: Path) -> None:
    code, out, err = check("--auth-token-path", str(tmp_path / "missing"))
    assert (code, len(err.splitlines())) == (2, 1)
    assert "AUTH_TOKEN_PATH" in err.upper().replace("-", "_")
    assert "can start" not in out[-1]
    assert check("--port", "70000")[0] == 2
    assert (tmp_path / "log").read_text() == ""  # which is about pods that failed
