"""Refuse a model that does not fit into memory before any weight is read.

The sizes come from the model built on the meta device. What is converted or packed may take more for a while.
"""

import copy
import logging
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from tgis.engines.memory.available import rank_memory
from tgis.engines.quantization.config import Quantization
from tgis.errors import StartError
from tgis.ipc.messages import EngineOptions
from tgis.utils.logs import format_bytes

log = logging.getLogger(__name__)

SizedModel = tuple[PreTrainedModel, int]  # on the meta device; the bytes that a rank's share takes on its own
_BESIDE = 2  # bytes for each number of a weight: as saved and merged with others, or codes before they are packed


def check_model_fits(
    auto_class: Any,
    options: EngineOptions,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    quantization: Quantization | None = None,
) -> SizedModel:
    """StartError if loading the model as `dtype` needs more memory than is available.

    `auto_class` is one of transformers' AutoModel classes.
    """
    with torch.device("meta"):
        model = auto_class.from_config(copy.deepcopy(config), dtype=dtype, trust_remote_code=False)
    if quantization and quantization.checkpoint:
        quantization.checkpoint.find_embeddings(model)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    log.info("  %s of weights", format_bytes(weights))
    together = sum(_quantized_bytes(model, quantization, options.num_shards)) if quantization else weights
    needed, free = together // options.num_shards, max(rank_memory(options, device), 0)
    if needed > free:
        raise StartError(
            f"{options.model_path} is too big: loading its {format_bytes(weights)} of weights takes"
            f" {format_bytes(needed)} of memory on {device}, and {format_bytes(free)} are free; grant more memory,"
            " choose a smaller DTYPE or share the model among NUM_SHARD devices"
        )
    return model, needed


def _quantized_bytes(model: PreTrainedModel, how: Quantization, num_shards: int) -> Iterator[int]:
    """Bytes of each weight, and what it takes to read or quantize the largest, for all ranks together."""
    if how.checkpoint:
        layers, tied = how.checkpoint.layers, how.checkpoint.embeddings if model.config.tie_word_embeddings else ()
        plain = sum(parameter.nbytes for parameter in model.parameters())
        yield max(plain - sum(math.prod(layer.shape) for layer in layers) * how.dtype.itemsize, 0)
        yield sum(layer.num_bytes for layer in (*layers, *tied))
        yield max((_BESIDE * math.prod(layer.shape) for layer in layers), default=0) * num_shards  # each reads all
        return
    if how.bits is None:  # weights in 16 bits, one after the other in float32
        sizes = [parameter.numel() for parameter in model.parameters()]
        yield 2 * sum(sizes)
        yield how.dtype.itemsize * max(sizes)
        return
    head, linears = model.get_output_embeddings(), {module for module in model.modules() if type(module) is nn.Linear}
    quantized = {module.weight for module in linears if how.logits or module is not head}
    for module in linears:
        bits = 8 if module is head else how.bits
        scales = 4 / module.in_features if bits == 8 else 4 / 32
        yield int(module.weight.numel() * (bits / 8 + scales)) if module.weight in quantized else module.weight.nbytes
    others = {
        parameter for module in model.modules() if module not in linears for parameter in module.parameters(False)
    }
    yield sum(parameter.nbytes for parameter in others)
    yield max((_BESIDE * weight.numel() for weight in quantized), default=0)
