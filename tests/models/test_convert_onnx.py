"""`tgis convert-to-onnx`: errors, and the config for older transformers. The graphs are tested with their engine."""

from pathlib import Path

import pytest
from safetensors.torch import save_file
from torch import zeros

from demo.fake_model import make_fake_model
from tgis import __main__
from tgis.errors import StartError
from tgis.models.onnx import optimum_export
from tgis.models.onnx.export import _to_transformers_4


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CACHE_DIR", str(tmp_path / "cache"))
    directory = make_fake_model(tmp_path / "model")
    save_file({"w": zeros(1)}, directory / "model.safetensors")
    return directory


def refusal(model: Path, out: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert __main__.run(["convert-to-onnx", str(model), str(out), *options]) != 0
    assert not list(out.parent.glob(f".{out.name}-*"))
    return capsys.readouterr().err.splitlines()[-1].removeprefix("tgis: ")


def script(folder: Path, *lines: str) -> Path:
    """A shell script that replaces the Python interpreter."""
    path = folder / "python"
    path.write_text("\n".join(["#!/bin/sh", *lines]))
    path.chmod(0o755)
    return path


def test_refusals(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "has no safetensors weights" in refusal(make_fake_model(tmp_path / "empty"), tmp_path / "out", capsys)
    (tmp_path / "precious" / "folder").mkdir(parents=True)
    assert refusal(model, tmp_path / "precious", capsys) == f"{tmp_path}/precious is there already"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "onnx" else name)
    refused = refusal(model, tmp_path / "out", capsys)
    assert refused == "convert-to-onnx needs onnx: pip install '.[onnx]' in a checkout"


def test_packages_that_cannot_be_installed(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    said = refusal(model, tmp_path / "out", capsys)
    assert said.startswith("cannot install Optimum (PIP_FIND_LINKS and --python need no network): ")
    assert "No matching distribution" in said
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_the_given_interpreter_exports(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The graphs are the export's, all other files the model's."""
    writes, config = ('cp "$1" "$3/model.onnx"', 'echo old > "$3/config.json"'), (model / "config.json").read_text()
    python = script(tmp_path, 'mkdir "$3"', *writes)
    out = tmp_path / "deep" / "out"
    assert __main__.run(["convert-to-onnx", str(model), str(out), "--python", str(python)]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    expected = {path.name for path in model.iterdir()} - {"model.safetensors"} | {"model.onnx"}
    assert {path.name for path in out.iterdir()} == expected
    assert [(path / "config.json").read_text() for path in (model, out)] == [config] * 2
    assert (out / "model.onnx").read_text() == Path(optimum_export.__file__).read_text()
    assert list(out.parent.iterdir()) == [out]


def test_an_export_that_fails_leaves_nothing(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    python = script(tmp_path, 'mkdir "$3"', "echo no such layer >&2", "exit 1")
    out = tmp_path / "deep" / "out"
    assert refusal(model, out, capsys, "--python", str(python)) == f"Optimum cannot export {model}: no such layer"
    assert list(out.parent.iterdir()) == []


def test_rope_parameters_get_their_former_names() -> None:
    plain = {"rope_parameters": {"rope_theta": 1e5, "rope_type": "default"}, "hidden_size": 8}
    assert _to_transformers_4(plain) == {"rope_theta": 1e5, "rope_scaling": None, "hidden_size": 8}
    scaled = {"rope_theta": 5e5, "partial_rotary_factor": 0.25, "rope_type": "llama3", "factor": 8.0}
    assert _to_transformers_4({"text_config": {"rope_parameters": scaled}}) == {
        "text_config": {
            "rope_theta": 5e5,
            "partial_rotary_factor": 0.25,
            "rope_scaling": {"rope_type": "llama3", "factor": 8.0},
        }
    }
    assert _to_transformers_4({"rope_theta": 1e4}) == {"rope_theta": 1e4}
    layers = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    with pytest.raises(StartError, match="rope_parameters that differ between layers"):
        _to_transformers_4({"rope_parameters": layers})
