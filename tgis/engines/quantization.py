"""What QUANTIZE means for a model: nothing where its files are quantized themselves, which transformers reads."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig

from tgis.errors import StartError
from tgis.ipc.messages import EngineOptions

_BITS = {"int8": 8, "bitsandbytes": 8, "int4": 4}
_FORMATS = {"gptq_marlin": "gptq", "awq_marlin": "awq"}  # vLLM's names of kernels for a format
_NEAREST = {"fp8": "int8"}  # of all other formats int4


@dataclass(frozen=True, slots=True)
class Quantization:
    """How a model is quantized while it is loaded."""

    bits: int  # of weights, 8 or 4
    activations: bool  # multiply by activations in 8 bits
    logits: bool  # the weight of the logits, too: in 8 bits
    dtype: torch.dtype  # of all else

    def __str__(self) -> str:
        heads = ", that of the logits to int8" if self.logits else ""
        return f"int{self.bits}{heads}, with {'int8' if self.activations else 'plain'} activations"


def resolve_quantization(
    options: EngineOptions, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device
) -> Quantization | None:
    """How the model is quantized while it is loaded; StartError where that cannot be."""
    asked = options.quantize
    if asked == "none":
        return None
    found: Any = getattr(config, "quantization_config", None)
    if found is not None:
        method = found.get("quant_method") if isinstance(found, dict) else found.quant_method
        method = str(getattr(method, "value", method))
        if _FORMATS.get(asked, asked) != method:
            raise StartError(f"QUANTIZE={asked}, but the weights are quantized by {method!r:.40}")
        return None
    if asked not in _BITS:
        instead = _NEAREST.get(asked, "int4")
        raise StartError(f"QUANTIZE={asked}, but the weights are plain: QUANTIZE={instead} quantizes them")
    if device.type != "cpu" or options.num_shards > 1:
        where = device.type if device.type != "cpu" else "several ranks (NUM_SHARD)"
        raise StartError(f"QUANTIZE={asked} works on one CPU only, not on {where}")
    return Quantization(_BITS[asked], options.quantize_activations != "none", options.quantize_logits, dtype)
