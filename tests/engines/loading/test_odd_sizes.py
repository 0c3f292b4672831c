"""glassllm's layers have 341 inputs or outputs: what formats can hold such weights, and the refusals of the others."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from quantized_formats import (
    AWQ,
    BITSANDBYTES,
    CHANNELS,
    E4M3,
    GPTQ,
    GROUPS,
    TOKENS,
    Quantize,
    check_layers,
    compressed_tensors,
    in_4_bits,
    in_bytes,
    load,
    packed,
    quantized_copy,
    rounded,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

from tgis.errors import StartError

IDS = torch.tensor([[2, 9, 130, 700, 40], [5, 4, 3, 2, 1]])
CHANNEL4 = CHANNELS | {"num_bits": 4}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
HELD: dict[str, tuple[dict[str, Any], Quantize]] = {
    "4 bits, channels": (compressed_tensors("pack-quantized", CHANNEL4), packed(4, None, trained=True)),
    "4 bits, groups": (
        compressed_tensors("pack-quantized", GROUPS | {"group_size": 32}),
        packed(4, 32, trained=True),
    ),
    "8 bits, asymmetric groups": (
        compressed_tensors("pack-quantized", GROUPS | {"num_bits": 8, "group_size": 128, "symmetric": False}),
        packed(8, 128, symmetric=False, trained=True),
    ),
    "int8": (
        compressed_tensors("int-quantized", CHANNELS),
        in_bytes(1, None, "weight_scale", e4m3=False, trained=True),
    ),
    "int8 activations": (
        compressed_tensors("int-quantized", CHANNELS, input_activations=TOKENS),
        in_bytes(1, None, "weight_scale", e4m3=False, trained=True),
    ),
    "E4M3": (compressed_tensors("float-quantized", E4M3), in_bytes(1, None, "weight_scale", trained=True)),
    "fp8": (BLOCKS, in_bytes(128, 128, "weight_scale_inv", trained=True)),
    "bitsandbytes, int8": (BITSANDBYTES, in_bytes(1, None, "SCB", e4m3=False, trained=True)),
    "bitsandbytes, nf4": (BITSANDBYTES, in_4_bits("nf4", 64, trained=True)),
    "bitsandbytes, fp4": (BITSANDBYTES, in_4_bits("fp4", 64, trained=True)),
}


@pytest.fixture
def one_layer(glassllm_dir: Path, tmp_path: Path) -> Path:
    """The first layer of the model."""
    config = msgspec.json.decode((glassllm_dir / "config.json").read_bytes()) | {"num_hidden_layers": 1}
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(config))
    tensors = load_file(glassllm_dir / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if "layers." not in name or "layers.0." in name}
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    return tmp_path


@pytest.mark.parametrize("name", HELD)
@torch.no_grad()  # type: ignore[untyped-decorator]
def test_checkpoints(name: str, one_layer: Path) -> None:
    config, quantize = HELD[name]
    expected = quantized_copy(one_layer, quantize, config)
    model = load(one_layer)
    check_layers(model, expected, IDS, rounded if name == "int8 activations" else Tensor.double)
    if name != "int8 activations":  # of which the next layer's may be rounded to other codes
        logits = expected.double()(IDS).logits
        assert (model(IDS).logits - logits).abs().max() < 1e-4 * logits.abs().max()


def in_8_bits(weight: Tensor) -> np.ndarray:
    rows = weight.numpy()
    scales = abs(rows).max(1, keepdims=True) / np.float32(127)
    numbers: np.ndarray = (rows / scales).round() * scales.astype(np.float64)
    return numbers


def in_groups(weight: Tensor) -> np.ndarray:
    found = np.zeros(weight.shape)
    for at in range(0, weight.shape[1], 32):
        part = weight[:, at : at + 32]
        low, high = (np.asarray(each.bfloat16().float())[:, None] for each in (part.amin(1), part.amax(1)))
        scale = np.asarray(torch.from_numpy((high - low) / np.float32(15)).bfloat16().float())
        found[:, at : at + 32] = ((part.numpy() - low) / scale).round().clip(0, 15) * scale.astype(np.float64) + low
    return found


@pytest.mark.parametrize(("asked", "numbers"), [("int8", in_8_bits), ("int4", in_groups)])
def test_quantized_while_loading(asked: str, numbers: Callable[[Tensor], np.ndarray], one_layer: Path) -> None:
    plain = shutil.copytree(one_layer, one_layer / "plain")
    expected = quantized_copy(one_layer, lambda weight: ({}, torch.from_numpy(numbers(weight))), None)
    check_layers(load(plain, quantize=asked), expected, IDS, lambda x: rounded(x, group=32, steps=127))


def padded_gptq(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Words for more inputs and outputs than there are."""
    outputs, inputs = (size + -size % 32 for size in weight.shape)
    tensors = {"qweight": torch.ones(inputs // 8, outputs, dtype=torch.int32)}
    tensors["qzeros"] = torch.ones(inputs // 16, outputs // 8, dtype=torch.int32)
    return tensors | {"scales": torch.ones(inputs // 16, outputs)}, weight


def padded_awq(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    tensors, _ = padded_gptq(weight)
    return tensors | {
        "qweight": torch.ones(weight.shape[1], tensors["scales"].shape[1] // 8, dtype=torch.int32)
    }, weight


@pytest.mark.parametrize(("config", "quantize", "found"), [(GPTQ, padded_gptq, 352), (AWQ, padded_awq, 352)])
def test_whole_words_do_not_hold_them(config: dict[str, Any], quantize: Quantize, found: int, one_layer: Path) -> None:
    quantized_copy(one_layer, quantize, config)
    error = rf"mlp\.\w+_proj\.weight has the shape \[.*{found}.*\] in the files, \[.*341.*\] in LlamaForCausalLM$"
    with pytest.raises(StartError, match=error):
        load(one_layer)
