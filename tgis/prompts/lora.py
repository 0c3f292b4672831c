"""LoRA adapters: read from PEFT's files, checked, and converted for the layers of a model.

The tensors say which layers are adapted. They are checked against target_modules if that is a list, but not if it is a
regular expression, as PEFT allows: an untrusted one can take forever to match.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from tgis.errors import AdapterError
from tgis.prompts.files import CONFIG, AdapterDirectory
from tgis.prompts.tensor_file import (
    TargetModel,
    allocated_bytes,
    check_tensor,
    convert_tensor,
    load_peft_tensors,
    read_config,
)

MAX_RANK = 512
_TENSOR_NAME = re.compile(r"base_model\.model\.([\w.]{1,100})\.lora_([AB])\.weight")
_MODULE_NAME = re.compile(r"[\w.]+")
# PEFT's other initialisations also change the weights of the base model
_SUPPORTED_INITS = (True, False, None, "gaussian", "eva", "orthogonal")


# Fields that mean more than a product of two matrices; each must be absent, empty or false.
_UNSUPPORTED_FIELDS = (
    *("use_dora", "lora_bias", "modules_to_save", "trainable_token_indices", "target_parameters"),
    *("layer_replication", "alora_invocation_tokens", "use_qalora", "use_bdlora"),
    *("arrow_config", "kasa_config", "monteclora_config", "megatron_config"),
)


class _LoraConfig(msgspec.Struct):
    """The fields of adapter_config.json that matter for LoRA."""

    r: int = 8
    lora_alpha: float = 8
    use_rslora: bool = False
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    target_modules: list[str] | str | None = None
    bias: str = "none"
    init_lora_weights: Any = True


@dataclass(frozen=True, slots=True)
class LoraLayerWeights:
    """Adds `x @ lora_a.T @ lora_b` to the output of a layer."""

    lora_a: torch.Tensor  # [rank, in features]
    lora_b: torch.Tensor  # [rank, out features], times PEFT's scaling


@dataclass(frozen=True, slots=True, eq=False)
class LoraAdapter:
    """The weights of an adapter in the model's dtype and on its device."""

    version: int  # a digest of its files
    layers: dict[str, LoraLayerWeights]  # layers by module name

    length = decoder_length = 0  # virtual tokens

    @property
    def rank(self) -> int:
        """The highest rank of any layer."""
        return max(len(layer.lora_a) for layer in self.layers.values())

    @property
    def size(self) -> int:
        """Bytes of memory."""
        return allocated_bytes(part for layer in self.layers.values() for part in (layer.lora_a, layer.lora_b))


def read_lora(directory: AdapterDirectory, limit: int, target: TargetModel) -> LoraAdapter:
    """The adapter of a directory for the model, from a file of at most `limit` bytes; AdapterError if unusable."""
    for field, value in read_config(directory, dict[str, Any]).items():
        if value and field in _UNSUPPORTED_FIELDS:
            raise AdapterError(f"{CONFIG} has {field}, which is not supported")
    config = read_config(directory, _LoraConfig)
    _check_config(config)
    name, content = load_peft_tensors(directory, limit)
    pairs = _pairs(name, content, config, limit)
    if target.lora_targets is not None and not target.lora_targets:
        raise AdapterError("this server takes no LoRA adapters: its engine has none")
    layers = {}
    for layer, pair in sorted(pairs.items()):
        label = f"{name}: {layer}"
        if target.lora_targets is not None:
            _check_shape(label, pair, target.lora_targets.get(layer))
        down = convert_tensor(f"{label}.lora_A", pair["A"], target)
        up = convert_tensor(f"{label}.lora_B", pair["B"].T, target, _scaling(config, layer))
        layers[layer] = LoraLayerWeights(down, up)
    return LoraAdapter(directory.version, layers)


def _pairs(name: str, content: Any, config: _LoraConfig, limit: int) -> dict[str, dict[str, torch.Tensor]]:
    """The matrices "A" [rank, in] and "B" [out, rank] of each module, checked except against the model."""
    if not isinstance(content, dict) or not content:
        raise AdapterError(f"{name} holds no tensors by name")
    layers: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in content.items():
        match = _TENSOR_NAME.fullmatch(key) if isinstance(key, str) else None
        if match is None:
            raise AdapterError(f"{name} holds {repr(key)[:100]}, which is no matrix of LoRA for a linear layer")
        layer, side = match.groups()
        layers.setdefault(layer, {})[side] = check_tensor(f"{name}: {layer}.lora_{side}", tensor)
    if (size := sum(tensor.nbytes for pair in layers.values() for tensor in pair.values())) > limit:
        raise AdapterError(f"{name} holds matrices of {size} bytes, at most {limit} are allowed")  # some share theirs
    for layer, pair in sorted(layers.items()):
        _check_ranks(f"{name}: {layer}", pair, _pattern_value(config.rank_pattern, layer, config.r))
        if isinstance(config.target_modules, list) and not any(_ends_with(layer, one) for one in config.target_modules):
            raise AdapterError(f"{name}: {layer} is not among the target_modules of {CONFIG}")
    return layers


def _check_config(config: _LoraConfig) -> None:
    if config.bias != "none":
        raise AdapterError(f"{CONFIG} has bias {config.bias[:20]!r}, only 'none' is supported")
    if config.init_lora_weights not in _SUPPORTED_INITS:
        text = f"{CONFIG} has init_lora_weights {repr(config.init_lora_weights)[:20]}, which is not supported"
        raise AdapterError(f"{text}: it changes the model's own weights")
    for name, pattern in (("rank_pattern", config.rank_pattern), ("alpha_pattern", config.alpha_pattern)):
        for key in pattern or ():
            if not _MODULE_NAME.fullmatch(key):
                raise AdapterError(f"{CONFIG} has {key[:40]!r} in its {name}, only names are supported")


def _check_ranks(label: str, pair: Mapping[str, torch.Tensor], rank: int) -> None:
    if len(pair) < 2:
        raise AdapterError(f"{label} has lora_{min(pair)} alone")
    ranks = (pair["A"].shape[0], pair["B"].shape[1])
    if ranks != (rank, rank):
        raise AdapterError(f"{label} has matrices of rank {ranks[0]} and {ranks[1]}, {CONFIG} says {rank}")
    if not 1 <= rank <= MAX_RANK:
        raise AdapterError(f"{label} has rank {rank}, from 1 to {MAX_RANK} are allowed")


def _check_shape(label: str, pair: Mapping[str, torch.Tensor], expected: tuple[int, int] | None) -> None:
    shape = (pair["A"].shape[1], pair["B"].shape[0])
    if expected is None:
        raise AdapterError(f"{label} is no linear layer of this model that can be adapted")
    if shape != expected:
        text = f"{label} is for {shape[0]} inputs and {shape[1]} outputs"
        raise AdapterError(f"{text}, the model's layer has {expected[0]} and {expected[1]}")


def _scaling(config: _LoraConfig, layer: str) -> float:
    rank = _pattern_value(config.rank_pattern, layer, config.r)
    alpha = _pattern_value(config.alpha_pattern, layer, config.lora_alpha)
    return float(alpha / (math.sqrt(rank) if config.use_rslora else rank))


def _pattern_value(pattern: Mapping[str, Any] | None, layer: str, default: Any) -> Any:
    """The value of the first key that is a suffix of the module name, as in PEFT."""
    return next((value for name, value in (pattern or {}).items() if _ends_with(layer, name)), default)


def _ends_with(layer: str, name: str) -> bool:
    return layer == name or layer.endswith(f".{name}")
