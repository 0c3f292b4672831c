"""Small weights, quantized by the libraries whose checkpoints we read, and what these say that the codes stand for.

Run in an environment with compressed-tensors 0.20 and bitsandbytes 0.50, which are not dependencies of ours:
`python library_checkpoints.py tests/engines/loading/checkpoints`. Layer NAME has the tensors NAME.*, and its weight in
float32 is `expected/NAME`.
"""

# mypy: disable-error-code="import-not-found"
import json
import sys
from pathlib import Path
from typing import Any

import bitsandbytes.functional as bnb
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import calculate_qparams, compute_dynamic_scales_and_zp
from safetensors.torch import save_file

OUTPUTS, INPUTS = 12, 72
TOKENS: dict[str, Any] = {"num_bits": 8, "strategy": "token", "dynamic": True}
STATIC: dict[str, Any] = {"num_bits": 8, "strategy": "tensor"}
FP8: dict[str, Any] = {"num_bits": 8, "type": "float"}
SCHEMES: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {  # format, weights, activations
    "int4_groups": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 24}, None),
    "int4_asymmetric": (
        "pack-quantized",
        {"num_bits": 4, "strategy": "group", "group_size": 8, "symmetric": False},
        None,
    ),
    "int4_channels": ("pack-quantized", {"num_bits": 4, "strategy": "channel", "symmetric": False}, TOKENS),
    "int8_groups": ("pack-quantized", {"num_bits": 8, "strategy": "group", "group_size": 36}, None),
    "int8_asymmetric": ("pack-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}, None),
    "int8_tokens": ("int-quantized", {"num_bits": 8, "strategy": "channel"}, TOKENS),
    "int8_static": ("int-quantized", {"num_bits": 8, "strategy": "tensor"}, STATIC),
    "fp8_tensor": ("float-quantized", FP8 | {"strategy": "tensor"}, FP8 | {"strategy": "tensor"}),
    "fp8_channels": ("float-quantized", FP8 | {"strategy": "channel"}, None),
    "fp8_blocks": ("naive-quantized", FP8 | {"strategy": "block", "block_structure": [8, 32]}, None),
}


def blocks_of(weight: torch.Tensor, args: QuantizationArgs) -> torch.Tensor:  # [rows, groups, numbers]
    """Weights that share a scale."""
    outputs, inputs = weight.shape
    match args.strategy:
        case "tensor":
            return weight.reshape(1, 1, -1)
        case "channel":
            return weight[:, None]
        case "group":
            return weight.unflatten(1, (-1, args.group_size))
    rows, columns = args.block_structure
    padded = torch.nn.functional.pad(weight, (0, -inputs % columns, 0, -outputs % rows))
    return padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).transpose(1, 2).flatten(2)


def compressed(x: torch.Tensor) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    tensors, groups = {"x": x}, {}
    for name, (layout, weights, inputs) in SCHEMES.items():
        scheme = QuantizationScheme(targets=[name], weights=weights, input_activations=inputs, format=layout)
        weight = torch.randn(OUTPUTS, INPUTS)
        found = blocks_of(weight, scheme.weights)
        scale, zero = calculate_qparams(found.amin(-1), found.amax(-1), scheme.weights)
        scale, zero = (each.flatten() if weights["strategy"] == "tensor" else each for each in (scale, zero))
        compressor = BaseCompressor.get_value_from_registry(layout)
        state = compressor.compress({"weight": weight, "weight_scale": scale, "weight_zero_point": zero}, scheme)
        tensors[f"expected/{name}"] = compressor.decompress(state, scheme)["weight"].float().clone()
        if inputs is not None and inputs.get("type") != "float":
            args = scheme.input_activations
            if inputs is STATIC:
                state["input_scale"] = torch.tensor([0.02])
                number, zero = state["input_scale"], torch.zeros(1)
            else:
                number, zero = compute_dynamic_scales_and_zp(x[None], args, torch.nn.Module())
            tensors[f"inputs/{name}"] = fake_quantize(x[None], number, zero, args)[0].clone()
        tensors |= {f"{name}.{suffix}": tensor.contiguous() for suffix, tensor in state.items()}
        groups[name] = scheme.model_dump(mode="json")
    return tensors, {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups}


def bitsandbytes() -> dict[str, torch.Tensor]:
    codes, scale, _ = bnb.int8_vectorwise_quant(torch.randn(OUTPUTS, INPUTS, dtype=torch.float16))
    expected = bnb.int8_vectorwise_dequant(codes, scale).float()
    stored = {"int8.weight": codes, "int8.SCB": scale, "int8.weight_format": torch.tensor(0).byte()}
    return stored | {"expected/int8": expected}


if __name__ == "__main__":
    torch.manual_seed(0)
    found, config = compressed(2 * torch.randn(8, INPUTS))
    metadata = {"format": "pt", "quantization_config": json.dumps(config)}
    save_file(found, Path(sys.argv[1]) / "compressed_tensors.safetensors", metadata)
    metadata["quantization_config"] = json.dumps({"quant_method": "bitsandbytes"})
    save_file(bitsandbytes(), Path(sys.argv[1]) / "bitsandbytes.safetensors", metadata)
