"""Refuse a model that does not fit into memory before any weight is read.

The sizes come from the model built on the meta device. What is converted or packed may take more for a while.
"""

import logging
import math
from collections.abc import Iterator

import torch
from torch import nn
from transformers import PreTrainedModel

from tgis.engines.memory.available import rank_memory
from tgis.engines.quantization.config import Quantization
from tgis.engines.quantization.experts import StoredWeight, quantized_bytes
from tgis.errors import StartError
from tgis.ipc.messages import EngineOptions
from tgis.utils.logs import format_bytes

log = logging.getLogger(__name__)

SizedModel = tuple[PreTrainedModel, int]  # on the meta device; the bytes that a rank's share takes on its own
_BESIDE = 2  # bytes for each number of a weight: as saved and merged with others, or codes before they are packed
_UNPACKED = 3  # bytes for each number of a weight of experts before it is packed: merged, and as codes
_QUANTIZING, _PART = 16, 1 << 20  # bytes for each number of a part that is quantized at a time, and its numbers


def check_model_fits(
    model: PreTrainedModel, options: EngineOptions, device: torch.device, quantization: Quantization | None = None
) -> int:
    """The bytes that a rank's share of a model takes; `model` is on the meta device. StartError if that is more than
    is available.
    """
    if quantization and quantization.checkpoint:
        quantization.checkpoint.find_embeddings(model)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    log.info("  %s of weights", format_bytes(weights))
    stored: dict[str, StoredWeight] = getattr(model, "stored_experts", {})
    bits = quantization.bits if quantization else None
    others = [parameter for name, parameter in model.named_parameters() if name not in stored]
    together = sum(parameter.nbytes for parameter in others)
    if quantization:
        together = sum(_quantized_bytes(model, others, quantization, options.num_shards))
    experts = sum(weight.packed_bytes(model.get_parameter(name), bits) for name, weight in stored.items())
    packing = [_UNPACKED * model.get_parameter(name).numel() for name in stored]
    together = experts + max([together, *packing])  # experts are packed before the others
    needed, free = together // options.num_shards, max(rank_memory(options, device), 0)
    if needed > free:
        raise StartError(
            f"{options.model_path} is too big: loading its {format_bytes(weights)} of weights takes"
            f" {format_bytes(needed)} of memory on {device}, and {format_bytes(free)} are free; grant more memory,"
            " choose a smaller DTYPE or share the model among NUM_SHARD devices"
        )
    return needed


def _quantized_bytes(
    model: PreTrainedModel, weights: list[nn.Parameter], how: Quantization, num_shards: int
) -> Iterator[int]:
    """Bytes of each of these weights of a model, and what it takes to read or quantize the largest, for all ranks
    together.
    """
    if how.checkpoint:
        layers, tied = how.checkpoint.layers, how.checkpoint.embeddings if model.config.tie_word_embeddings else ()
        plain = sum(parameter.nbytes for parameter in weights)
        yield max(plain - sum(math.prod(layer.shape) for layer in layers) * how.dtype.itemsize, 0)
        yield sum(layer.num_bytes for layer in (*layers, *tied))
        yield max((_BESIDE * math.prod(layer.shape) for layer in layers), default=0) * num_shards  # each reads all
        return
    if how.bits is None:  # weights in 16 bits, one after the other in float32
        sizes = [parameter.numel() for parameter in weights]
        yield 2 * sum(sizes)
        yield how.dtype.itemsize * max(sizes)
        return
    head, linears = model.get_output_embeddings(), {module for module in model.modules() if type(module) is nn.Linear}
    quantized = {module.weight for module in linears if how.logits or module is not head}
    for module in linears:
        bits = 8 if module is head else how.bits
        yield quantized_bytes(module.weight, bits) if module.weight in quantized else module.weight.nbytes
    others = {
        parameter for module in model.modules() if module not in linears for parameter in module.parameters(False)
    }
    yield sum(parameter.nbytes for parameter in others.intersection(weights))
    largest = max((weight.numel() for weight in quantized), default=0)
    yield _BESIDE * largest + _QUANTIZING * min(largest, _PART)
