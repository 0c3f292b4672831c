"""`tgis serve` around the server: an unexpected error, and the limit of open files."""

import json
import os
import resource
from pathlib import Path

import pytest

from tgis.cli import serve
from tgis.config import Config
from tgis.utils import logs


@pytest.mark.usefixtures("logging_as_before")
def test_an_unexpected_error_is_in_both_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(_config: Config) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(serve, "prepare_environment", fail)
    (tmp_path / "termination").touch()
    paths = "--termination-log", str(tmp_path / "termination"), "--cache-dir", str(tmp_path)
    assert serve.main(["--model-name", "m", "--json-output", *paths], "tgis serve") == 1
    logs._streams[0].stop()
    (line,) = map(json.loads, capfd.readouterr().out.splitlines())
    assert line["level"] == "ERROR"
    assert "ValueError: a bug" in line["exception"]
    assert (tmp_path / "termination").read_text() == "ValueError: a bug\n"
    monkeypatch.setenv("JSON_OUTPUT", "true")
    assert serve.main(["--port", "70000"], "tgis serve") == 2
    logs._streams[0].stop()
    line = json.loads(capfd.readouterr().out)
    assert (line["level"], "port" in line["message"]) == ("CRITICAL", True)


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
