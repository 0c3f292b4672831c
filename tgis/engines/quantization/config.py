"""What QUANTIZE means for a model: how it is quantized while it is loaded, or how its files are quantized."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from tgis.engines.quantization.awq import AwqFormat
from tgis.engines.quantization.checkpoint import Format, QuantizedCheckpoint, read_checkpoint
from tgis.engines.quantization.weight import ActivationCodes, QuantizedWeight
from tgis.errors import StartError
from tgis.ipc.messages import EngineOptions

_BITS = {"int8": 8, "bitsandbytes": 8, "int4": 4}
_NAMES = {"gptq_marlin": "gptq", "awq_marlin": "awq"}  # vLLM's of kernels for a format
_NEAREST = {"fp8": "int8"}  # of all other formats int4
_FORMATS: dict[str, Callable[[Mapping[str, Any]], Format]] = {"awq": AwqFormat}  # of quantization_config
_WIDENED = frozenset({"mxfp4"})  # by transformers, while it loads the model


@dataclass(frozen=True, slots=True)
class Quantization:
    """How the linear layers of a model are quantized."""

    bits: int | None  # of weights that are plain in the files; None: they stay plain
    logits: bool  # the weight of the logits, too: in 8 bits
    activations: str  # auto, none or int8
    dtype: torch.dtype  # of all else
    checkpoint: QuantizedCheckpoint | None = None

    def __str__(self) -> str:
        heads = ", that of the logits to int8" if self.logits else ""
        kind = f"as {self.checkpoint.method}" if self.checkpoint else f"to int{self.bits}"
        return f"{kind}{heads}, with {self.activations} activations"

    def activations_of(self, weight: QuantizedWeight | None = None) -> ActivationCodes | None:
        """How what multiplies a weight is rounded; None: a weight that is quantized while it is loaded."""
        if self.activations == "none":
            return None
        if weight is None:
            return ActivationCodes()
        if self.activations == "int8" and weight.activations is None:
            if not weight.has_integers:
                raise StartError("QUANTIZE_ACTIVATIONS=int8 works with codes that are integers, not with these")
            return ActivationCodes()
        return weight.activations


def resolve_quantization(
    options: EngineOptions, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device
) -> Quantization | None:
    """How the model is quantized; StartError where that cannot be. `config` no longer says so to transformers."""
    asked = options.quantize
    found: Any = getattr(config, "quantization_config", None)
    method = None if found is None else str(found.get("quant_method"))
    if method is None and asked == "none":
        return None
    if method is not None and asked != "none" and _NAMES.get(asked, asked) != method:
        raise StartError(f"QUANTIZE={asked}, but the weights are quantized by {method!r:.40}")
    if method in _WIDENED:
        return None
    if method is not None and method not in _FORMATS:
        known = ", ".join(sorted(_FORMATS))
        raise StartError(f"weights quantized by {method!r:.40} are not supported, only by {known}")
    if method is None and asked not in _BITS:
        instead = _NEAREST.get(asked, "int4")
        raise StartError(f"QUANTIZE={asked}, but the weights are plain: QUANTIZE={instead} quantizes them")
    if device.type != "cpu" or options.num_shards > 1:
        where = device.type if device.type != "cpu" else "several ranks (NUM_SHARD)"
        weights = f"QUANTIZE={asked} works" if method is None else f"weights quantized by {method!r:.40} work"
        raise StartError(f"{weights} on one CPU only, not on {where}")
    logits, activations = options.quantize_logits, options.quantize_activations
    if method is None:
        return Quantization(_BITS[asked], logits, activations, dtype)
    checkpoint = read_checkpoint(Path(options.model_path), method, _FORMATS[method](found))
    del config.quantization_config
    return Quantization(None, logits, activations, dtype, checkpoint)
