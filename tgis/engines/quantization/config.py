"""What QUANTIZE means for a model: how it is quantized while it is loaded, or how its files are quantized."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import PreTrainedConfig

from tgis.engines.quantization.bitsandbytes import BitsAndBytesFormat
from tgis.engines.quantization.checkpoint import Format, QuantizedCheckpoint, read_checkpoint, read_tensors
from tgis.engines.quantization.compressed_tensors import CompressedTensorsFormat
from tgis.engines.quantization.fp8 import Fp8Format
from tgis.engines.quantization.gguf import read_gguf
from tgis.engines.quantization.gptq import AwqFormat, GptqFormat, tgis_description
from tgis.engines.quantization.weight import ActivationCodes, QuantizedWeight
from tgis.errors import StartError
from tgis.ipc.messages import EngineOptions
from tgis.models.files import read_json

_BITS = {"int8": 8, "bitsandbytes": 8, "int4": 4}
_NAMES = {"gptq_marlin": "gptq", "awq_marlin": "awq"}  # vLLM's of kernels for a format
# Files that old AutoGPTQ, old AutoAWQ and ModelOpt write beside config.json.
_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}


def _auto_round_format(config: Mapping[str, Any]) -> Format:
    """auto-round writes the layouts of others, too: GPTQ's of version 2 has no name there."""
    kind = str(config.get("packing_format")).removeprefix("auto_round:")
    if kind == "auto_awq":
        return AwqFormat(config)
    versions = {"auto_gptq": "gptq", "auto_round": "gptq_v2", "exllamav2": "gptq_v2"}
    return GptqFormat({**config, "checkpoint_format": versions.get(kind, kind)})


def _modelopt_format(config: Mapping[str, Any]) -> Format:
    kind = config.get("quantization", config).get("quant_algo")
    if kind != "FP8":
        raise StartError(f"quant_algo {kind!r:.20} of modelopt is not supported, only 'FP8'")
    return Fp8Format({})


_FORMATS: dict[str, Callable[[Mapping[str, Any]], Format]] = {  # formats by quant_method
    "auto-round": _auto_round_format,
    "awq": AwqFormat,
    "bitsandbytes": BitsAndBytesFormat,
    "compressed-tensors": CompressedTensorsFormat,
    "fp8": Fp8Format,
    "gptq": GptqFormat,
    "modelopt": _modelopt_format,
}
_GGUF = "gguf"  # said by directories that tgis makes for these files
_WIDENED = "mxfp4"  # while the model is loaded


@dataclass(frozen=True, slots=True)
class Quantization:
    """How the linear layers of a model are quantized."""

    bits: int | None  # bits of weights that are plain in the files; None: they stay plain
    logits: bool  # the weight of the logits, too: in 8 bits
    activations: str  # auto, none or int8
    dtype: torch.dtype  # dtype of everything else
    checkpoint: QuantizedCheckpoint | None = None

    @property
    def name(self) -> str:
        """The name of the format, else int8, int4 or none."""
        return self.checkpoint.method if self.checkpoint else f"int{self.bits}" if self.bits else "none"

    def __str__(self) -> str:
        if self.name == "none":
            return "as saved"
        heads = ", that of the logits to int8" if self.logits else ""
        kind = f"{'as' if self.checkpoint else 'to'} {self.name}"
        return f"quantized {kind}{heads}, with {self.activations} activations"

    def activations_of(self, weight: QuantizedWeight | None = None) -> ActivationCodes | None:
        """How the activations of a weight are rounded, or of one that is quantized while it is loaded (None)."""
        if self.activations == "none":
            return None
        if weight is None:
            return ActivationCodes()
        if self.activations == "int8" and weight.activations is None:
            if not weight.has_integers:
                raise StartError("QUANTIZE_ACTIVATIONS=int8 works with codes that are integers, not with these")
            return ActivationCodes()
        return weight.activations


def resolve_quantization(options: EngineOptions, config: PreTrainedConfig, dtype: torch.dtype) -> Quantization | None:
    """How the model is quantized; StartError if that is not supported. Removes the description from `config`, or
    transformers would quantize the model, unless weights are widened while they are loaded.
    """
    asked = options.quantize
    path = Path(options.model_path)
    stated = _description(config, path, _NAMES.get(asked, asked))
    method = None if stated is None else str(stated.get("quant_method"))
    if method is None:
        read_tensors(path)  # read_tensors refuses codes
    if method is None and asked == "none":
        if options.quantize_logits or options.quantize_activations == "int8":
            raise StartError(
                "QUANTIZE_LOGITS and QUANTIZE_ACTIVATIONS=int8 need QUANTIZE=int8 or int4: weights are plain"
            )
        return None
    if method is not None and asked != "none" and _NAMES.get(asked, asked) != method:
        raise StartError(f"QUANTIZE={asked}, but the weights are quantized by {method!r:.40}")
    if method == _WIDENED:
        return None
    if method is not None and method not in (*_FORMATS, _GGUF):
        known = ", ".join(sorted([*_FORMATS, _GGUF]))
        raise StartError(f"{path}: weights quantized by {method!r:.40} are not supported, only by {known}")
    if method is None and asked not in _BITS:
        instead = "use QUANTIZE=int8 or int4, or convert them with tgis quantize"
        raise StartError(f"QUANTIZE={asked}, but the weights are not quantized: {instead}")
    logits, activations = options.quantize_logits, options.quantize_activations
    if method is None:
        return Quantization(_BITS[asked], logits, activations, dtype)
    vars(config).pop("quantization_config", None)
    checkpoint = read_gguf(path, config) if method == _GGUF else read_checkpoint(path, method, _layout(method, stated))
    return Quantization(None, logits, activations, dtype, checkpoint)


def kept_as_saved(
    auto_class: Any, options: EngineOptions, config: PreTrainedConfig, dtype: torch.dtype
) -> Quantization | None:
    """A Quantization that quantizes nothing and keeps weights in the 16 bits of the files until they are packed, for
    CPUs that compute in float32; None for a model that would compute constants in 16 bits when it is loaded so.
    """
    saved = config.dtype
    if dtype != torch.float32 or saved not in (torch.bfloat16, torch.float16) or options.cpu_isa == "none":
        return None
    if config.is_encoder_decoder or options.num_shards > 1:  # tables of positions are weights that no file has
        return None
    with torch.device("meta"):
        buffers = auto_class.from_config(copy.deepcopy(config), dtype=saved, trust_remote_code=False).buffers()
    tensors = [*read_tensors(Path(options.model_path))[0].values(), *(x for x in buffers if x.dtype == saved)]
    is_saved = all(tensor.dtype == saved and tensor.device.type != "meta" for tensor in tensors)
    return Quantization(None, logits=False, activations="none", dtype=dtype) if is_saved else None


def _layout(method: str, description: Mapping[str, Any]) -> Format:
    for key in ("dynamic", "extra_config"):  # GPTQModel's and auto-round's options of single layers
        for name, options in (description.get(key) or {}).items():
            is_plain = name.startswith("-") or options.get("bits", 0) >= 16
            if not is_plain and not options.items() <= description.items():
                raise StartError(f"quantization_config.{key}: other options for {name!r:.60} are not supported")
    try:
        return _FORMATS[method](description)
    except msgspec.ValidationError as error:
        raise StartError(f"quantization_config: {error}") from error


def _description(config: PreTrainedConfig, path: Path, asked: str) -> Any:
    """The description of a quantized checkpoint, None if it is plain. TGIS's files need QUANTIZE=gptq."""
    if (description := getattr(config, "quantization_config", None)) is not None:
        return description
    if (description := getattr(config, "compression_config", None)) is not None:
        return {**description, "quant_method": "compressed-tensors"}
    for name, method in _FILES.items():
        if (path / name).is_file():
            return {"quant_method": method, **read_json(path / name)}
    return tgis_description(path) if asked == "gptq" else None
