"""GGUF files: blocks of codes as llama.cpp defines them, under the names and in the order that transformers has."""

import copy
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

from tgis.engines.quantization.checkpoint import QuantizedCheckpoint, QuantizedLayer
from tgis.engines.quantization.weight import INT4, INT8, QuantizedWeight
from tgis.errors import StartError
from tgis.models.gguf import BLOCKS, WEIGHTS, GgufTensor, read_header

# llama.cpp writes weights of these as they are, with their rows in another order, or with norms that differ by 1
_ARCHITECTURES = frozenset(
    {"llama", "qwen2", "qwen3", "qwen3moe", "phi3", "starcoder2", "nemotron", "gemma2", "gemma3", "t5"}
)
_EXPERTS = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}  # parameters, and matrices of the file
_EXPERT_DIMS = 3
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Bytes that a number takes where it is multiplied
_PACKED_BYTES = {"Q4_0": 0.75, "Q4_1": 0.75, "Q4_K": 0.75, "Q8_0": 1.125, "Q5_0": 1.125, "Q5_K": 1.25, "Q6_K": 1.25}
_ROPE = "rope_"  # tensors with factors of frequencies, which the config has, too


def read_gguf(path: Path, config: PreTrainedConfig) -> QuantizedCheckpoint:
    """The checkpoint in the GGUF file of a directory, whose tensors stay in the file."""
    file = path / WEIGHTS
    header = read_header(path)
    if header.architecture not in _ARCHITECTURES:
        known = ", ".join(sorted(_ARCHITECTURES))
        raise StartError(f"GGUF files of models of type {header.architecture!r:.40} are not supported, only of {known}")
    auto_class = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    with torch.device("meta"):
        model = auto_class.from_config(copy.deepcopy(config), trust_remote_code=False)
    processor = TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)(config=config.to_dict())
    names = _names(model, header.architecture)
    data = torch.from_file(str(file), shared=False, size=file.stat().st_size, dtype=torch.uint8)
    plain: dict[str, Tensor] = {}
    layers: list[QuantizedLayer] = []
    for name, tensor in _matrices(header.tensors):
        if name.startswith(_ROPE):
            continue
        if name not in names or (tensor.kind not in _PLAIN and len(tensor.shape) != 2):
            where = f"no place in {type(model).__name__}"
            raise StartError(f"{file}: the tensor {name!r:.80}, {[*tensor.shape]} of type {tensor.kind}, has {where}")
        rows = partial(_rows, data, tensor, processor, name)
        if tensor.kind in _PLAIN:
            plain[names[name]] = rows().view(tensor.shape)
            continue
        target, read = names[name].removesuffix(".weight"), partial(_read, tensor.kind, rows)
        size = int(prod(tensor.shape) * _PACKED_BYTES[tensor.kind])
        layers.append(QuantizedLayer(target, (tensor.shape[0], tensor.shape[1]), size, read))
    return QuantizedCheckpoint("gguf", plain, layers)


def _names(model: PreTrainedModel, architecture: str) -> dict[str, str]:
    """The names of tensors in transformers by those in the file, by the tables that transformers uses."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map  # noqa: PLC0415 - an extra

    number = next(number for number, name in MODEL_ARCH_NAMES.items() if name == architecture)
    table = get_tensor_name_map(number, model.config.get_text_config(decoder=True).num_hidden_layers)
    names: dict[str, str] = {}
    for name, weight in model.state_dict().items():
        module, dot, kind = name.rpartition(".")
        names.setdefault(f"{table.get_name(module)}{dot}{kind}", name)
        if weight.dim() == _EXPERT_DIMS:
            layer = name.removeprefix("model.layers.").partition(".")[0]
            for expert, part in product(range(len(weight)), _EXPERTS.get(kind, ())):
                names[f"{expert}.blk.{layer}.ffn_{part}_exps.weight"] = f"{module}.{expert}.{part}_proj.weight"
    return names


def _matrices(tensors: Mapping[str, GgufTensor]) -> Iterator[tuple[str, GgufTensor]]:
    """Tensors by name; those of experts as one matrix for each, whose name begins with its number."""
    for name, tensor in tensors.items():
        if len(tensor.shape) != _EXPERT_DIMS:
            yield name, tensor
            continue
        count, *shape = tensor.shape
        size = tensor.num_bytes // count
        for expert in range(count):
            yield f"{expert}.{name}", GgufTensor(tensor.kind, tuple(shape), tensor.start + expert * size, size)


def _rows(data: Tensor, tensor: GgufTensor, processor: Any, name: str) -> Tensor:
    """The values or bytes [out, ...] of a tensor, as transformers orders them."""
    stored = data[tensor.start : tensor.start + tensor.num_bytes].view(_PLAIN.get(tensor.kind, torch.uint8))
    return processor.process(stored.view(tensor.shape[0], -1), name).weights


def _read(kind: str, rows: Callable[[], Tensor]) -> QuantizedWeight:
    return _READERS[kind](rows().unflatten(1, (-1, BLOCKS[kind][1])))


def _halves(octets: Tensor) -> Tensor:  # the bytes of float16 [..., 2 n] -> float32 [..., n]
    return octets.contiguous().view(torch.float16).float()


def _nibbles(codes: Tensor) -> Tensor:  # the low ones of all bytes, then the high ones
    return torch.cat([codes & 15, codes >> 4], -1)


def _weight(codes: Tensor, table: Tensor, scale: Tensor, offset: Tensor | None = None) -> QuantizedWeight:
    """From [out, blocks, ...]."""
    codes, scale = codes.flatten(1), scale.flatten(1)
    offset = None if offset is None else offset.flatten(1)
    return QuantizedWeight(codes, table, scale, offset, codes.shape[1] // scale.shape[1])


def _q4_0(blocks: Tensor) -> QuantizedWeight:  # scale, codes
    scale = _halves(blocks[..., :2])
    return _weight(_nibbles(blocks[..., 2:]), INT4, scale, -8 * scale)


def _q4_1(blocks: Tensor) -> QuantizedWeight:  # scale, offset, codes
    return _weight(_nibbles(blocks[..., 4:]), INT4, _halves(blocks[..., :2]), _halves(blocks[..., 2:4]))


def _q5_0(blocks: Tensor) -> QuantizedWeight:  # scale, the highest bits of codes, their lower bits
    high = (blocks[..., 2:6, None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(-2)
    return _weight((_nibbles(blocks[..., 6:]) | high << 4) + (128 - 16), INT8, _halves(blocks[..., :2]))


def _q8_0(blocks: Tensor) -> QuantizedWeight:  # scale, codes with a sign
    return _weight(blocks[..., 2:] ^ 128, INT8, _halves(blocks[..., :2]))


def _k_ranges(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and offsets of 8 groups: scales of both in float16, and 8 of each in 6 bits.

    The first four of each stand in the low bits of bytes, whose high bits belong to the others.
    """
    scale, offset = _halves(blocks[..., :2]), _halves(blocks[..., 2:4])
    first, second, rest = blocks[..., 4:16].split(4, -1)
    scales = torch.cat([first & 63, rest & 15 | first >> 6 << 4], -1)
    offsets = torch.cat([second & 63, rest >> 4 | second >> 6 << 4], -1)
    return scale * scales, -(offset * offsets)


def _q4_k(blocks: Tensor) -> QuantizedWeight:  # ranges, codes of pairs of groups
    return _weight(_nibbles(blocks[..., 16:].unflatten(-1, (4, 32))), INT4, *_k_ranges(blocks))


def _q5_k(blocks: Tensor) -> QuantizedWeight:  # ranges, the highest bits of codes, their lower bits
    scale, offset = _k_ranges(blocks)
    high = blocks[..., None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1  # [out, blocks, groups, 32]
    low = _nibbles(blocks[..., 48:].unflatten(-1, (4, 32))).unflatten(-1, (2, 32)).flatten(-3, -2)
    return _weight((low | high << 4) + 128, INT8, scale, offset)


def _q6_k(blocks: Tensor) -> QuantizedWeight:  # lower bits of codes, higher bits, 16 scales with a sign, their scale
    low = blocks[..., :128].unflatten(-1, (2, 1, 64)) >> torch.tensor([[0], [4]], dtype=torch.uint8) & 15
    high = blocks[..., 128:192].unflatten(-1, (2, 1, 32)) >> torch.tensor([[0], [2], [4], [6]], dtype=torch.uint8) & 3
    codes = (low.flatten(-3) | high.flatten(-3) << 4) + (128 - 32)
    return _weight(codes, INT8, _halves(blocks[..., 208:]) * blocks[..., 192:208].contiguous().view(torch.int8))


_READERS: dict[str, Callable[[Tensor], QuantizedWeight]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q8_0": _q8_0, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
}  # fmt: skip
