"""Checkpoints of compressed-tensors whose layers have different arguments, or activations in 8 bits; refusals; what
compressed-tensors 0.20 and bitsandbytes 0.50 make of their own weights.

`git show 78c46fa3:tests/support/library_checkpoints.py` made the files.
"""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from quantized_formats import (
    CHANNELS,
    E4M3,
    GROUPS,
    TOKENS,
    Quantize,
    check_layers,
    compressed_tensors,
    in_bytes,
    load,
    packed,
    quantized_copy,
    rounded,
    with_input_scale,
)
from safetensors import safe_open
from tiny_models import make_config, make_model, make_model_from_config
from torch import Tensor, nn

from tgis.engines.quantization import compressed_tensors as reader
from tgis.engines.quantization import weight
from tgis.engines.quantization.bitsandbytes import BitsAndBytesFormat
from tgis.engines.quantization.checkpoint import Format, read_checkpoint
from tgis.engines.quantization.compressed_tensors import CompressedTensorsFormat
from tgis.errors import StartError

IDS = torch.tensor([[5, 9, 13, 7, 40], [1, 2, 3, 4, 5]])
STATIC: dict[str, Any] = TOKENS | {"strategy": "tensor", "dynamic": False}
INT8 = in_bytes(1, None, "weight_scale", e4m3=False)


@torch.no_grad()  # type: ignore[untyped-decorator]
def test_each_layer_has_the_arguments_of_its_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The tensors of each fit no other; a name goes before a pattern, and this before a class."""
    monkeypatch.setattr(weight, "_CHUNK", 1000)  # embeddings are widened in several
    caplog.set_level("INFO", reader.__name__)
    asymmetric = GROUPS | {"symmetric": False, "group_size": 8}
    config = compressed_tensors("mixed-precision", GROUPS)
    config["config_groups"] |= {
        "patterns": {"targets": [r"re:.*\.mlp\.(up|gate)_proj$"], "weights": asymmetric, "format": "pack-quantized"},
        "names": {"targets": ["model.layers.1.mlp.up_proj", "Embedding"], "weights": CHANNELS},
        "floats": {"targets": [r"re:model\.layers\.\d\.self_attn\.[kv]_proj"], "weights": E4M3},
    }
    config["ignore"] += ["model.layers.0.self_attn.o_proj", "re:.*1.*down_proj", "re:mlp"]  # no name begins so
    config["kv_cache_scheme"] = {}
    quantize: dict[str, Quantize | None] = {
        r"0\.self_attn\.o_proj|1\.mlp\.down_proj": None,
        r"1\.mlp\.up_proj|embed_tokens": INT8,
        "up_proj|gate_proj": packed(4, 8, symmetric=False),
        "k_proj|v_proj": in_bytes(1, None, "weight_scale"),
        "": packed(4, 16),
    }
    expected = quantized_copy(make_model("Llama", tmp_path), quantize, config, (nn.Linear, nn.Embedding))
    logits = expected.double()(IDS).logits
    assert (load(tmp_path)(IDS).logits - logits).abs().max() < 1e-4 * logits.abs().max()
    assert caplog.messages == ["quantization_config has a kv_cache_scheme, which is ignored"]


@torch.no_grad()  # type: ignore[untyped-decorator]
def test_groups_of_minus_one_are_in_order(tmp_path: Path) -> None:
    """The library fills g_idx with -1, and reads columns in their order where it finds one."""

    def quantize(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        tensors, expected = packed(4, 16)(weight)
        return tensors | {"weight_g_idx": torch.full(weight.shape[1:], -1, dtype=torch.int32)}, expected

    config = compressed_tensors("pack-quantized", GROUPS | {"actorder": "group"})
    expected = quantized_copy(make_model("Llama", tmp_path), quantize, config)
    check_layers(load(tmp_path), expected, IDS, lambda x: x.double())


@pytest.mark.parametrize(("scale", "size"), [(None, 48), (None, 43), (0.03, 48)])
@torch.no_grad()  # type: ignore[untyped-decorator]
def test_activations_in_8_bits(scale: float | None, size: int, tmp_path: Path) -> None:
    path = make_model_from_config(make_config("Llama", intermediate_size=size), tmp_path)
    config = compressed_tensors("int-quantized", CHANNELS, input_activations=TOKENS if scale is None else STATIC)
    expected = quantized_copy(path, INT8 if scale is None else with_input_scale, config)
    check_layers(load(tmp_path), expected, IDS, lambda x: rounded(x, scale))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {  # changes of the configuration or of its group
    "format": ({"format": "nvfp4-pack-quantized"}, "Invalid enum value 'nvfp4-pack-quantized' - at `$.format`"),
    "sparsity": ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "Invalid enum value 'sparse-24-bitmask'"),
    "transform": ({"transform_config": {"config_groups": {}}}, "Expected `object` of length <= 0"),
    "bits": ({"weights": CHANNELS | {"num_bits": 3}}, "Invalid enum value 3"),
    "group": ({"weights": GROUPS | {"group_size": "16"}}, "Expected `int | null`, got `str`"),
    "outputs": (
        {"output_activations": TOKENS},
        "Expected `null`, got `object` - at `$.config_groups[...].output_activations`",
    ),
    "inputs": (
        {"input_activations": STATIC | {"symmetric": False}},
        "LAYER: int weights with static asymmetric int8 activations by ",
    ),
    "floats": ({"input_activations": TOKENS, "weights": E4M3}, "LAYER: float weights with dynamic symmetric int8"),
    "ignored": ({"ignore": ["re:.*q_proj"]}, "LAYER is quantized, but quantization_config does not say how"),
    "targets": ({"targets": ["Embedding"]}, "LAYER is quantized, but quantization_config does not say how"),
    "count": ({"targets": ["re:a{9}"]}, "the pattern 'a{9}' is too long, or has a count"),
    "long": ({"targets": ["re:" + 301 * "."]}, f"the pattern '{59 * '.'} is too long, or has a count"),
    "pattern": ({"targets": ["re:("]}, "the pattern '(': missing ) at position 1"),
    "slow": ({"ignore": ["re:(?:.|..)+(?:.|..)+[xq]$"]}, "the pattern '(?:.|..)+(?:.|..)+[xq]$': regex timed out"),
    "type": ({"weights": E4M3}, "LAYER: weight is int8, not float8_e4m3fn"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_MATCH_SECONDS", 0.05)
    changes, error = REFUSED[name]
    config = compressed_tensors("int-quantized", CHANNELS)
    group = config["config_groups"]["group_0"]
    for key, value in changes.items():
        (config if key in ("format", "ignore") or key.endswith("_config") else group)[key] = value
    quantized_copy(make_model("Llama", tmp_path), {"": INT8}, config)
    with pytest.raises(StartError) as refusal:
        load(tmp_path)
    found = re.sub(r"^model\.layers\.\d[a-z_.]+", "LAYER", str(refusal.value).removeprefix("quantization_config: "))
    assert found.startswith(error)


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
