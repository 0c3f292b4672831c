"""`tgis quantize`: refusals, and what auto-round is asked for."""

import json
from pathlib import Path

import pytest
from torch import nn

from demo.fake_model import make_fake_model
from tgis import __main__
from tgis.errors import StartError
from tgis.models.quantize import _fit, _samples


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_fake_model(tmp_path / "model")


def run(model: Path, out: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str, str]:
    code = __main__.run(["quantize", str(model), str(out), *options])
    assert not list(out.parent.glob(f".{out.name}-*"))
    shown = capsys.readouterr()
    return code, shown.out, shown.err.removeprefix("tgis: ")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--bits", "3"], "--bits: '3' must be one of 4, 8"),
        (["--bits", "8", "--format", "awq"], "--format=awq has weights of 4 bits only, not --bits=8"),
        (["--format", "gguf"], "--format: 'gguf' must be one of gptq, awq, compressed-tensors"),
        (["--iterations", "0"], "--iterations: '0' must be a whole number from 1 to 10000"),
    ],
)
def test_invalid_options(
    options: list[str], error: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, said = run(model, tmp_path / "out", capsys, *options)
    assert (code, error in said) == (2, True), said


def test_refusals(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").touch()
    assert run(model, tmp_path / "out", capsys) == (1, "", f"{tmp_path / 'out'} is there already\n")
    out = tmp_path / "new"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "auto_round" else name)
    needs = "quantize needs auto_round: pip install '.[quantize]' in a checkout\n"
    assert run(model, out, capsys) == (1, "", needs)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    said = run(model, out, capsys, "--act-order", "--percdamp=0.02", "--calibration", str(tmp_path / "no"))[2]
    assert f"--calibration {tmp_path / 'no'}: [Errno 2] No such file or directory" in said
    only = "only plain decoder-only models are quantized\n"
    config = json.loads((model / "config.json").read_text())
    for change, kind in (
        ({"quantization_config": {}}, "quantized already"),
        ({"is_encoder_decoder": True}, "an encoder-decoder"),
    ):
        (model / "config.json").write_text(json.dumps(config | change))
        assert run(model, out, capsys) == (1, "", f"{model} is {kind}: {only}")
    assert not out.exists()


def test_samples_have_one_length() -> None:
    encode = lambda texts: {"input_ids": [[*text.encode()] for text in texts]}  # noqa: E731
    pieces = _samples(encode, ["abc" * 20, "d" * 50], 40)
    assert [piece.tolist() for piece in pieces] == [[[*(b"abc" * 14)[:40]]], [[*b"bc", *b"abc" * 6, *b"d" * 20]]]
    with pytest.raises(StartError, match="have 3 tokens, at least 32"):
        _samples(encode, ["abc"], 40)


class Layers(nn.Module):  # type: ignore[misc]
    def __init__(self, *shapes: tuple[int, int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*shape) for shape in shapes)
        self.head = nn.Linear(7, 7)

    def get_output_embeddings(self) -> nn.Linear:
        return self.head


@pytest.mark.parametrize(
    ("shapes", "asked", "skipped", "size"),
    [
        ([(576, 1536), (1536, 576)], 128, [], 64),
        ([(96, 64), (341, 64), (64, 40)], 128, ["layers.1", "layers.2"], 32),
        ([(576, 64)], None, [], -1),
    ],
)
def test_groups_are_halved(shapes: list[tuple[int, int]], asked: int | None, skipped: list[str], size: int) -> None:
    assert _fit(Layers(*shapes), asked) == (skipped, size)
