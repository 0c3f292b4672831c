"""`tgis quantize`: refusals, and what auto-round is asked for."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import save_file
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


def encode(texts: list[str]) -> dict[str, list[list[int]]]:
    return {"input_ids": [[*text.encode()] for text in texts]}


def test_samples_have_one_length() -> None:
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
        ([(576, 64)], 32, [], 32),
        ([(576, 64)], None, [], -1),
    ],
)
def test_groups_are_halved(
    shapes: list[tuple[int, int]], asked: int | None, skipped: list[str], size: int, capsys: Any
) -> None:
    assert _fit(Layers(*shapes), asked) == (skipped, size)
    said = capsys.readouterr().err
    assert ("does not divide every layer" in said) == (size not in (asked, -1))
    assert (f"{len(skipped)} layers whose sizes are no multiples of " in said) == bool(skipped)


@pytest.mark.parametrize("calibrated", [False, True])
def test_auto_round_is_asked_and_all_else_is_the_models(
    calibrated: bool, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stands in for auto-round, which pins other versions of much."""
    asked: dict[str, Any] = {}

    class AutoRound:
        def __init__(self, *_: object, **named: Any) -> None:
            asked.update(named)

        def quantize_and_save(self, folder: str, format: str) -> tuple[None, str]:  # noqa: A002
            Path(folder, "model.safetensors").touch(0o600)
            Path(folder, "tokenizer.json").touch()
            return None, folder

    network, tokenizer = Mock(), Mock()
    network.from_pretrained.return_value, tokenizer.from_pretrained.return_value = Layers((96, 64), (341, 64)), encode
    schemes = SimpleNamespace(QuantizationScheme=lambda *scheme, **named: (*scheme, named))
    transformers = SimpleNamespace(AutoModelForCausalLM=network, AutoTokenizer=tokenizer)
    monkeypatch.setitem(sys.modules, "transformers", transformers)
    monkeypatch.setitem(sys.modules, "auto_round", SimpleNamespace(AutoRound=AutoRound))
    monkeypatch.setitem(sys.modules, "auto_round.schemes", schemes)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    save_file({"w": torch.zeros(1)}, model / "model.safetensors")
    (tmp_path / "texts").write_text("some text " * 8)
    texts = ["--format", "awq", "--calibration", str(tmp_path / "texts"), "--iterations", "7"]
    out, options = tmp_path / "out", texts if calibrated else ["--bits", "8"]
    code, shown, _ = run(model, out, capsys, *options)
    assert (code, shown) == (0, f"{out}\n")
    weights = out / "model.safetensors"
    assert (weights.read_bytes(), weights.stat().st_mode & 0o777) == (b"", 0o644)
    assert (out / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    samples = asked.pop("dataset", [])
    how = {"iters": 0, "nsamples": 0, "disable_opt_rtn": True}
    if calibrated:
        how = {"iters": 7, "nsamples": len(samples), "seqlen": 80, "batch_size": 4, "not_use_best_mse": True}
    scheme = (4, 32, False) if calibrated else (8, -1, True)
    what = {"scheme": (*scheme, "int", {"act_bits": 16}), "layer_config": {"layers.1": {"bits": 16}}}
    assert (len(samples), asked) == (calibrated, what | how | {"enable_torch_compile": False})
