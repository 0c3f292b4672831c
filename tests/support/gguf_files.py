"""GGUF files with random weights, as llama.cpp's converter writes them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, get_tensor_name_map
from gguf.quants import dequantize
from gguf.quants import quantize as rounded
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedConfig, PreTrainedModel

from tgis.models.convert.gguf import read_file
from tgis.models.gguf import HEADER

# Where float16 stand
_HALVES = {"Q8_0": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}
_SMALL = {"Q4_K": 1 / 64, "Q5_K": 1 / 64, "Q6_K": 1 / 256}  # they are multiplied by codes


def _random_blocks(kind: GGMLQuantizationType, rows: int, columns: int, seed: int) -> np.ndarray:
    """Bytes [out, ...] of a weight [out, in]."""
    numbers, size = GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (rows, columns // numbers, size), dtype=np.uint8)
    for at in _HALVES[kind.name]:
        halves = random.uniform(-1e-2, 1e-2, (*blocks.shape[:2], 1)) * _SMALL.get(kind.name, 1)
        blocks[..., at : at + 2] = halves.astype(np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


def permuted(name: str, weight: Tensor) -> Tensor:
    """What is done to the weights of a Llama with 4 and 2 heads: rotary pairs stand side by side."""
    heads = 4 if "attn_q." in name else 2 if "attn_k." in name else None
    return weight if heads is None else weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def one_more(name: str, weight: Tensor) -> Tensor:
    """What is done to those of a Gemma."""
    return weight + 1 if "norm" in name else weight


def write_gguf(
    file: Path,
    config: PreTrainedConfig,
    architecture: str,
    kind: str,
    change: Callable[[str, Tensor], Tensor] = lambda _, weight: weight,
    header: Callable[[GGUFWriter], Any] = lambda _: None,
) -> PreTrainedModel:
    """Write a file with matrices of this kind, and other weights in F32; also the model that they make."""
    torch.manual_seed(0)
    family = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model = family.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    number = next(number for number, name in MODEL_ARCH_NAMES.items() if name == architecture)
    table = get_tensor_name_map(number, config.num_hidden_layers)
    writer = GGUFWriter(file, architecture)
    header(writer)
    for name, weight in _named_weights(model, table):
        torch.nn.init.normal_(weight, std=0.2)
        is_plain = weight.dim() == 1 or weight.shape[1] <= 32 or "ffn_gate_inp" in name
        type_ = GGMLQuantizationType["F32" if is_plain else kind]
        random = type_.name in _HALVES
        rows = weight.flatten(0, -2) if weight.dim() > 1 else weight
        seed = len(rows) + len(name)
        content = _random_blocks(type_, len(rows), rows.shape[1], seed) if random else rounded(rows.numpy(), type_)
        weight.copy_(torch.from_numpy(dequantize(content, type_).reshape(weight.shape).copy()))
        changed = change(name, torch.from_numpy(content.copy())).contiguous().numpy()
        writer.add_tensor(name, changed.reshape(*weight.shape[:-1], -1), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save_header(file)
    return model


def _named_weights(model: PreTrainedModel, table: Any) -> Iterator[tuple[str, Tensor]]:
    """By the names in a file, without tied ones; those of experts in parts."""
    for path, parameter in model.named_parameters():
        module, _, suffix = path.rpartition(".")
        if parameter.dim() < 3:
            yield f"{table.get_name(module)}.{suffix}", parameter.data
            continue
        parts = {"up": ("gate", "up"), "down": ("down",)}["up" if suffix == "gate_up_proj" else "down"]
        for part, weight in zip(parts, parameter.data.chunk(len(parts), 1), strict=True):
            yield f"{table.get_name(f'{module}.{part}_proj')}.weight", weight


def save_header(file: Path) -> None:
    """Write what the engine reads of a file's header next to it."""
    (file.parent / HEADER).write_bytes(msgspec.json.encode(read_file(file)[1]))


def write_directory(path: Path, config: PreTrainedConfig) -> None:
    """What tgis makes for a file with a configuration beside it, but the file."""
    content = config.to_dict() | {"quantization_config": {"quant_method": "gguf"}}
    (path / "config.json").write_bytes(msgspec.json.encode(content))
