"""Checkpoints that are quantized: each layer's weights are what the files of its format say."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from batches import engine_options
from cpu_kernels import CACHE_DIR, CPU_ISA
from safetensors.torch import load_file, save_file
from tiny_models import make_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel

from tgis.engines.loading import loader

IDS = torch.tensor([[5, 9, 13, 7, 40]])
Quantize = Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]  # a weight -> its tensors, and what they stand for


def awq(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """In groups of 16; the column of nibble i of an int32 is (0, 2, 4, 6, 1, 3, 5, 7)[i] of eight."""
    outputs, inputs = weight.shape
    codes = np.random.default_rng(outputs).integers(0, 16, (inputs, outputs))
    zeros = np.random.default_rng(inputs).integers(0, 16, (inputs // 16, outputs))
    scales = np.random.default_rng(1).uniform(1e-3, 2e-2, zeros.shape).astype(np.float16)
    expected = np.zeros((outputs, inputs))
    for k in range(inputs):
        for n in range(outputs):
            expected[n, k] = float(scales[k // 16, n]) * (int(codes[k, n]) - int(zeros[k // 16, n]))

    def packed(numbers: np.ndarray) -> Tensor:
        rows = [
            [
                sum(int(row[8 * j + (0, 2, 4, 6, 1, 3, 5, 7)[i]]) << 4 * i for i in range(8))
                for j in range(len(row) // 8)
            ]
            for row in numbers
        ]
        return torch.from_numpy(np.array(rows, dtype=np.uint32).view(np.int32))

    tensors = {"qweight": packed(codes), "qzeros": packed(zeros), "scales": torch.from_numpy(scales)}
    return tensors, torch.from_numpy(expected)


FORMATS: dict[str, tuple[dict[str, Any], Quantize]] = {
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm"}, awq),
}


def quantized_copy(path: Path, quantize: Quantize, config: dict[str, Any]) -> PreTrainedModel:
    """Quantize the files of a model in place; also what they stand for."""
    kind = AutoModelForSeq2SeqLM if "T5" in (path / "config.json").read_text() else AutoModelForCausalLM
    expected = kind.from_pretrained(path, dtype=torch.float32).eval()
    tensors = load_file(path / "model.safetensors")
    for name, module in expected.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            found, numbers = quantize(tensors.pop(f"{name}.weight"))
            module.weight.data = numbers.float()
            tensors |= {f"{name}.{suffix}": tensor.contiguous() for suffix, tensor in found.items()}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    file = path / "config.json"
    file.write_bytes(msgspec.json.encode(msgspec.json.decode(file.read_bytes()) | {"quantization_config": config}))
    return expected


@pytest.mark.parametrize("model", ["Llama", "T5"])
@pytest.mark.parametrize("name", FORMATS)
@torch.no_grad()  # type: ignore[untyped-decorator]
def test_logits(name: str, model: str, tmp_path: Path) -> None:
    config, quantize = FORMATS[name]
    path = make_model(model, tmp_path)
    expected = quantized_copy(path, quantize, config)
    options = engine_options(path, 8, threads=1)
    options = msgspec.structs.replace(options, dtype="float32", cpu_isa=CPU_ISA, cache_dir=CACHE_DIR)
    found = loader.load_model(options, torch.device("cpu"))
    inputs = {"input_ids": IDS} | ({"decoder_input_ids": IDS[:, :2]} if found.config.is_encoder_decoder else {})
    logits = expected.double()(**inputs).logits
    assert (found(**inputs).logits - logits).abs().max() < 1e-4 * logits.abs().max()
