"""`tgis --help` and `tgis COMMAND --help`: complete; nothing is imported from the working directory."""

import argparse
import contextlib
import re
import sys
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
from harness import running_server, unary_request
from options_page import page
from repository import REPOSITORY
from tables import table

from demo.fake_model import make_fake_model
from tgis import __main__, __version__, config
from tgis.__main__ import COMMANDS
from tgis.config import Config
from tgis.utils.options import declared_options, flag_name


@pytest.fixture
def helps(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """What is printed, by the command line."""
    monkeypatch.setenv("COLUMNS", "80")
    found = {}
    for argv in (["--help"], *([command, "--help"] for command in COMMANDS)):
        with contextlib.suppress(SystemExit):
            __main__.run(argv)
        found[" ".join(argv)] = capsys.readouterr().out
    return found


def test_every_command_has_help_of_80_columns(helps: dict[str, str]) -> None:
    for command, (_, about) in COMMANDS.items():
        assert f"  {command:<27}{about}\n" in helps["--help"]
        assert helps[f"{command} --help"].startswith(f"usage: tgis {command} ")
    assert max(len(line) for text in helps.values() for line in text.splitlines()) <= 80


def test_texts_of_options(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Without those that docs/options.md has."""
    monkeypatch.setattr(argparse.ArgumentParser, "format_help", described)
    assert "".join(request.getfixturevalue("helps").values()) == (REPOSITORY / "tests/golden/help.txt").read_text()


def described(parser: argparse.ArgumentParser) -> str:
    texts = [f"{'/'.join(action.option_strings) or action.dest}: {action.help}\n" for action in parser._actions]
    shown = [text for text in texts if argparse.SUPPRESS not in text and "[env: " not in text]
    return "".join([f"{parser.prog}: {parser.description}\n", *shown])


@table("parameters", "tgis generate")
def test_help_names_an_option_in_full(helps: dict[str, str], row: dict[str, Any]) -> None:
    for flag in re.findall(r"--[\w-]+", row["options"]):
        assert re.search(rf"\s{flag}[\s,]", helps["generate --help"]), flag


def test_help_of_serve_describes_every_option(helps: dict[str, str]) -> None:
    text = helps["serve --help"]
    for row in declared_options(Config):
        _, _, entry = text.partition("Model:")[2].partition(f"{flag_name(row.name)} ")
        entry = " ".join(entry.split("\n  -")[0].split())
        assert row.help_text in entry
        assert f"[env: {', '.join(row.variables)}]" in entry
        assert (f"[default: {row.shown_default}]" if not row.required else "[required]") in entry


def test_the_page_of_options_is_generated() -> None:
    """By `python tests/support/options_page.py`."""
    assert (REPOSITORY / "docs/options.md").read_text() == page()


def test_help_shows_the_true_defaults() -> None:
    got = config.parse(["--model-name", "m"], {}, "tgis serve")
    for row in declared_options(Config):
        value = getattr(got, row.name)
        if isinstance(value, bool):
            assert row.shown_default == str(value).lower()
        elif isinstance(value, int | float) and row.name not in ("num_threads", "tokenization_workers"):
            assert float(row.shown_default or "") == value


def test_no_command_is_an_error(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert (__main__.run(["-V"]), capsys.readouterr().out) == (0, f"tgis {__version__}\n")
    with monkeypatch.context() as client_only:
        client_only.setattr(__main__, "find_spec", lambda _name: None)
        assert __main__.run(["convert-to-fast-tokenizer", "m"]) == 1
    assert capsys.readouterr().err.endswith(" needs the server: pip install . in a checkout\n")
    assert __main__.run([]) == 2
    assert capsys.readouterr().err.startswith("usage: tgis COMMAND")
    assert __main__.run(["sevre"]) == 2
    assert capsys.readouterr().err == "tgis: there is no command 'sevre', did you mean serve? (see tgis --help)\n"
    assert __main__.run(["-" * 99]) == 2
    assert capsys.readouterr().err == f"tgis: there is no command '{'-' * 79} (see tgis --help)\n"
    with pytest.raises(OSError, match="no pipe"), __main__._reader_may_leave():
        raise OSError("no pipe")


def test_text_generation_launcher_is_serve(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(
        sys, "argv", ["text-generation-launcher", "--dtype-str", "int4", "--strict-options", "--model-name", "m"]
    )
    assert __main__.launcher() == 2
    assert capsys.readouterr().err.startswith("tgis: STRICT_OPTIONS: --dtype-str='int4': using auto")
    version = f"tgis {__version__}\n"
    assert (__main__.run(["--version"]), capsys.readouterr().out) == (0, version)
    for flag, text in (("--version", version), ("-V", version), ("--help", "TIMEOUT] [default: 86400]")):
        monkeypatch.setattr(sys, "argv", ["text-generation-launcher", flag])
        with pytest.raises(SystemExit, match=r"^0$"):
            __main__.launcher()
        out = capsys.readouterr().out
        assert out == text or (flag == "--help" and text in out)


def test_server_and_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's directory has a module for every name that could be imported; each leaves a file when it is."""
    directory = make_fake_model(tmp_path / "model")
    installed = filter(str.isidentifier, packages_distributions())
    for name in {"tgis", "sitecustomize", "usercustomize", *sys.stdlib_module_names, *installed}:
        (directory / f"{name}.py").write_text("import posix\nposix.close(posix.open(__file__ + '.ran', 65, 0o600))\n")
    monkeypatch.chdir(directory)
    with running_server(tmp_path, directory, DEPLOYMENT_FRAMEWORK="fake") as server, server.stub() as stub:
        (response,) = stub.Generate(unary_request("hello", 3), timeout=120).responses
    assert response.generated_token_count == 3
    assert list(directory.glob("*.ran")) == []
