"""Checkpoints of bitsandbytes in int8."""

from collections.abc import Mapping
from typing import Any

import torch

from tgis.engines.quantization.checkpoint import Format, LayerTensors
from tgis.engines.quantization.weight import INT8, QuantizedWeight
from tgis.errors import StartError


class BitsAndBytesFormat(Format):
    """`weight` int8 [out, in] and `SCB` [out], the value of the code 127."""

    marks = frozenset({"SCB"})
    others = frozenset({"weight", "weight_format"})

    def __init__(self, config: Mapping[str, Any]) -> None:
        if config.get("load_in_4bit"):
            kind = config.get("bnb_4bit_quant_type", "fp4")
            raise StartError(
                f"quantization_config.bnb_4bit_quant_type {kind!r:.20} is not supported: serve a GPTQ, AWQ or GGUF "
                "checkpoint of the model, or the plain model with QUANTIZE=int8 or int4"
            )

    def read(self, tensors: LayerTensors) -> QuantizedWeight:
        if "weight_format" in tensors and tensors["weight_format"].any():
            raise StartError(f"{tensors.name}: the weight is not stored in rows")
        codes, shape = tensors.codes(torch.int8), self.shape(tensors)
        return QuantizedWeight(codes, INT8, tensors.row_values("SCB", shape, (1, shape[1])) / 127)
