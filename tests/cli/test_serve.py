"""`tgis serve` around the server: what becomes of an error that nobody expects."""

import json
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
