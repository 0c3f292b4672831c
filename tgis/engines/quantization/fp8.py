"""Checkpoints named fp8: E4M3 weights as DeepSeek and Qwen have them, or as vLLM's AutoFP8 wrote them."""

import logging
from collections.abc import Mapping
from typing import Any

import msgspec
import torch

from tgis.engines.quantization.checkpoint import Format, LayerTensors, Size
from tgis.engines.quantization.weight import E4M3, QuantizedWeight

log = logging.getLogger(__name__)


class _Config(msgspec.Struct):
    weight_block_size: tuple[Size, Size] | None = None


class Fp8Format(Format):
    """`weight` [out, in]; `weight_scale_inv` or `weight_scale` of blocks of `weight_block_size`, or of the tensor."""

    marks = frozenset({"weight_scale_inv", "weight_scale"})
    others = frozenset({"weight", "input_scale", "activation_scale"})

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._block = msgspec.convert(config, _Config).weight_block_size
        log.info("quantization_config has activations in 8-bit floats, which stay in DTYPE")

    def read(self, tensors: LayerTensors) -> QuantizedWeight:
        codes, shape = tensors.codes(torch.float8_e4m3fn), self.shape(tensors)
        block = self._block or shape
        suffix = "weight_scale_inv" if "weight_scale_inv" in tensors else "weight_scale"
        group = block[1] if block[1] < shape[1] else None
        return QuantizedWeight(codes, E4M3, tensors.row_values(suffix, shape, block), None, group)
