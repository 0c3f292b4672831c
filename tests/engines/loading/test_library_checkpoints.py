"""Weights quantized by compressed-tensors 0.20 and bitsandbytes 0.50, and what these libraries make of them.

`git show 78c46fa3:tests/support/library_checkpoints.py` made the files.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors import safe_open

from tgis.engines.quantization.bitsandbytes import BitsAndBytesFormat
from tgis.engines.quantization.checkpoint import Format, read_checkpoint
from tgis.engines.quantization.compressed_tensors import CompressedTensorsFormat

CHECKPOINTS = Path(__file__).parent / "checkpoints"


@pytest.mark.parametrize(
    ("name", "layout"), [("compressed_tensors", CompressedTensorsFormat), ("bitsandbytes", BitsAndBytesFormat)]
)
def test_layers(name: str, layout: Callable[[Any], Format], tmp_path: Path) -> None:
    shutil.copy(CHECKPOINTS / f"{name}.safetensors", tmp_path / "model.safetensors")
    with safe_open(tmp_path / "model.safetensors", "pt") as tensors:
        config = msgspec.json.decode(tensors.metadata()["quantization_config"])
        answers = {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118 - it is no dict
    layers = read_checkpoint(tmp_path, name, layout(config)).layers
    assert {f"expected/{layer.name}" for layer in layers} == {each for each in answers if each.startswith("expected/")}
    for layer in layers:
        weight, expected = layer.checked(), answers[f"expected/{layer.name}"]
        torch.testing.assert_close(weight.dequantized(), expected, rtol=1e-6, atol=1e-6, msg=layer.name)
        inputs = answers.get(f"inputs/{layer.name}")
        assert (inputs is None) == (weight.activations is None)
        if inputs is not None and weight.activations is not None:
            x, found = answers["x"], weight.fake_quantized(answers["x"])
            # the largest of a row is halfway between two codes, and rounded by chance there
            halfway = (x.abs() == x.abs().amax(-1, keepdim=True)) & (weight.activations.scale is None)
            torch.testing.assert_close(found[~halfway], inputs.double()[~halfway], rtol=1e-6, atol=0, msg=layer.name)
            assert ((found - inputs).abs() <= 1.01 / 127.5 * x.abs()).all()
