"""The commands for model files as run in init containers: exit codes, output, and serving the result."""

import functools
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import fake_hub
import pytest
import torch
from fake_hub import TOKEN, FakeHub
from huggingface_hub import HfApi, constants
from safetensors.torch import load_file, save
from tokenizers import Tokenizer

from demo.fake_model import make_fake_model
from tgis import __main__
from tgis.cli import download_weights
from tgis.models.files import ModelFiles

REPO = "org/name"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    """A hub with a model for the engine `fake`."""
    model = make_fake_model(tmp_path / "model")
    files = {path.name: path.read_bytes() for path in model.iterdir()}
    with fake_hub.running() as running:
        running.add(REPO, files | {"model.safetensors": save({"w": torch.arange(500_000)}), "README.md": b"# A model"})
        yield running


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs a command where HF_HOME is empty at first; exit code, stdout, stderr."""
    for name in [name for name in os.environ if name.startswith("HF_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr(download_weights, "HfApi", functools.partial(HfApi, endpoint=hub.endpoint))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))

    def run(*argv: str, **environ: str) -> tuple[int, str, str]:
        with monkeypatch.context() as patch:
            for name, value in environ.items():
                patch.setenv(name, value)
            code = __main__.run([*argv])
        return code, *capfd.readouterr()

    return run


def test_a_model_is_downloaded_once(hub: FakeHub, run: Run, tmp_path: Path) -> None:
    code, out, _ = run("download-weights", REPO)
    path = Path(out.splitlines()[-1])
    assert (code, out) == (0, f"{path}\n")
    assert path.parent == tmp_path / "hf" / "hub" / "models--org--name" / "snapshots"
    assert load_file(path / "model.safetensors")["w"].tolist() == list(range(500_000))
    hub.downloads.clear()
    assert run("download-weights", REPO)[:2] == (0, out)
    assert hub.downloads == []


def test_the_cache_is_where_the_environment_says(hub: FakeHub, run: Run, tmp_path: Path) -> None:
    code, out, _ = run("download-weights", REPO, TRANSFORMERS_CACHE=str(tmp_path / "cache"), PORT="of the server alone")
    assert (code, out.startswith(f"{tmp_path}/cache/models--org--name/")) == (0, True)
    assert not (tmp_path / "hf").exists()
    code, _, err = run("download-weights", REPO, HF_HUB_CACHE="/a", TRANSFORMERS_CACHE="/b")
    assert (code, err) == (2, "tgis: HF_HUB_CACHE='/a' and TRANSFORMERS_CACHE='/b' must be the same\n")


def test_tokens(hub: FakeHub, run: Run) -> None:
    hub.repos[REPO].private = True
    assert run("download-weights", REPO)[:2] == (1, "")
    assert run("download-weights", REPO, "--token", TOKEN)[0] == 0
    assert run("download-weights", REPO, HF_TOKEN=TOKEN)[0] == 0


@pytest.fixture
def old(hub: FakeHub, slow_gpt2: ModelFiles, tmp_path: Path) -> dict[str, torch.Tensor]:
    """The hub's model has .bin weights and a tokenizer of the old kind; returns the weights."""
    hub.repos.clear()
    weights = {"wte.weight": torch.randn(260, 4), "h": torch.randn(4, 4)}
    torch.save(weights, tmp_path / "pytorch_model.bin")
    files = {path.name: path.read_bytes() for path in slow_gpt2.path.iterdir()}
    hub.add(REPO, files | {"pytorch_model.bin": (tmp_path / "pytorch_model.bin").read_bytes()})
    return weights


def test_an_old_model_is_converted(hub: FakeHub, run: Run, old: dict[str, torch.Tensor]) -> None:
    code, out, err = run("download-weights", REPO)
    assert code == 0, err
    path = Path(out.strip())
    found = load_file(path / "model.safetensors")
    assert found.keys() == old.keys()
    assert all(torch.equal(found[name], old[name]) for name in old)
    assert Tokenizer.from_file(str(path / "tokenizer.json")).encode("hello").tokens == ["hell", "o"]
    assert f"{path}: pytorch_model.bin converted to safetensors\n" in err
    assert err.endswith(f"{path}/tokenizer.json was made\n")

    code, out, _ = run("convert-to-safetensors", REPO)
    assert (code, out) == (0, f"{path} has model.safetensors already: nothing to do (delete it to convert again)\n")
    code, out, _ = run("convert-to-fast-tokenizer", str(path))
    assert (code, out) == (0, f"{path} has a tokenizer.json already: nothing to do\n")

    (path / "pytorch_model.bin").unlink()  # the next run does not download it again
    hub.downloads.clear()
    code, out, _ = run("download-weights", REPO)
    assert (code, out.strip()) == (0, str(path))
    assert hub.downloads == []


def test_an_old_model_is_not_converted_on_request(hub: FakeHub, run: Run, old: dict[str, torch.Tensor]) -> None:
    for option in (["--no-auto-convert"], ["--auto_convert", "false"]):
        code, out, err = run("download-weights", REPO, *option)
        assert (code, out) == (1, "")
        assert err.endswith(f"tgis: {REPO} has no files that end with .safetensors\n")
    hub.add("org/empty", {"config.json": b"{}"})
    assert run("download-weights", "org/empty")[2].endswith("no files that end with .safetensors or .bin\n")
    code, out, _ = run("download-weights", REPO, "--no-auto-convert", "--extension", ".bin,.json,.txt")
    assert code == 0
    path = Path(out.strip())
    assert {file.name for file in path.iterdir()} == set(hub.repos[REPO].commits[path.name])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["download-weights"], "the following arguments are required: MODEL_NAME (see tgis download-weights --help)"),
        (["download-weights", "a/b", "--extension", "safetensors"], "must be extensions as .safetensors"),
        (["download-weights", "{model}"], "{model} is a directory on this machine, which is what would be served"),
        (["convert-to-fast-tokenizer", "{model}", "--output_path", "/no"], "--output-path='/no' is no directory"),
        (["convert-to-onnx", "{model}", "out", "--python", "/dev/null"], "'/dev/null' is not a program"),
    ],
)
def test_invalid_options(argv: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(make_fake_model(tmp_path / "model"))
    assert __main__.run([word.format(model=model) for word in argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message.format(model=model) in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("script", ["text-generation-server", "model-util"])
def test_the_names_of_tgis_and_the_adapter(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_fake_model(tmp_path / "model")
    monkeypatch.setattr(sys, "argv", [f"/usr/bin/{script}", "convert-to-safetensors", str(model)])
    assert __main__.model_files() == 0
    assert capsys.readouterr().out == f"{model} has no .bin weights: nothing to do\n"
    monkeypatch.setattr(sys, "argv", [f"/usr/bin/{script}", "--help"])
    assert __main__.model_files() == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: {script} COMMAND")
    assert re.findall(r"^  (\S+)", out, re.MULTILINE) == list(__main__.MODEL_FILE_COMMANDS)
    monkeypatch.setattr(sys, "argv", [f"/usr/bin/{script}", "serve", "m"])
    assert __main__.model_files() == 2
    assert capsys.readouterr().err == f"tgis: there is no command 'serve' (see {script} --help)\n"
