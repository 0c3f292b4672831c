"""Checkpoints of compressed-tensors: weights in integers or E4M3, with separate arguments for groups of layers."""

import logging
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
import regex
import torch
from msgspec import Meta
from torch import Tensor

from tgis.engines.quantization.checkpoint import LayerTensors, Size
from tgis.engines.quantization.gptq import column_order, unpacked
from tgis.engines.quantization.weight import E4M3, INT4, INT8, ActivationCodes, QuantizedWeight
from tgis.errors import StartError

log = logging.getLogger(__name__)

_STEPS = 127.5  # half of the range of int8
_MAX_PATTERN, _MATCH_SECONDS = 300, 10.0  # characters; for a layer
_EMBEDDING = regex.compile(r"(emb[^.]*|wte|wpe|shared)$")
_Format = Literal["dense", "int-quantized", "float-quantized", "naive-quantized", "pack-quantized", "mixed-precision"]
_Type = Literal["int", "float"]


class _Weights(msgspec.Struct, frozen=True):
    """How weights are quantized."""

    num_bits: Literal[4, 8] = 8
    type: _Type = "int"
    symmetric: bool = True
    strategy: Literal["tensor", "channel", "group", "block"] | None = None
    group_size: Annotated[int, Meta(ge=-1)] | None = None
    block_structure: tuple[Size, Size] | None = None

    def block(self, shape: tuple[int, int]) -> tuple[int, int]:
        """The outputs and inputs that share a scale."""
        if self.strategy == "block" and self.block_structure:
            return self.block_structure
        if self.strategy == "tensor" or (self.strategy is None and self.group_size is None):
            return shape
        return 1, self.group_size if self.group_size and self.group_size > 0 else shape[1]


class _Inputs(msgspec.Struct, frozen=True):
    """How activations are quantized."""

    num_bits: Literal[8] = 8
    type: _Type = "int"
    symmetric: bool = True
    strategy: Literal["tensor", "token", "group", "tensor_group"] | None = None
    dynamic: bool = False

    def __str__(self) -> str:
        kind = f"{'dynamic' if self.dynamic else 'static'} {'' if self.symmetric else 'a'}symmetric"
        return f"{kind} {self.type}{self.num_bits} activations by {self.strategy}"

    @property
    def is_supported(self) -> bool:
        return self.symmetric and (self.strategy or "tensor") == ("token" if self.dynamic else "tensor")


class _Group(msgspec.Struct, frozen=True):
    """Layers with the same arguments."""

    targets: list[str]
    weights: _Weights | None = None
    input_activations: _Inputs | None = None
    output_activations: None = None
    format: _Format | None = None


class _Sparsity(msgspec.Struct, frozen=True):
    format: Literal["dense"] = "dense"


class _Config(msgspec.Struct, frozen=True):
    config_groups: dict[str, _Group]
    format: _Format = "dense"
    ignore: list[str] | None = None
    kv_cache_scheme: dict[str, Any] | None = None
    sparsity_config: _Sparsity | None = None
    transform_config: Annotated[dict[str, Any], Meta(max_length=0)] | None = None


class CompressedTensorsFormat:
    """`weight_packed` int32 [out, in * bits / 32], lowest bits first, for a weight of `weight_shape`, or `weight` int8
    or E4M3 [out, in]; `weight_scale` and `weight_zero_point` of the tensor, outputs, groups of inputs or blocks;
    `weight_g_idx` [in], the group of each input (act-order). A weight is scale * (code - zero).
    """

    marks = frozenset({"weight_scale"})
    others = frozenset({"weight", "weight_packed", "weight_shape", "weight_zero_point", "weight_g_idx", "input_scale"})

    def __init__(self, config: Mapping[str, Any]) -> None:
        checked = msgspec.convert(config, _Config)
        groups = checked.config_groups.values()
        self._ignored = checked.ignore or []
        targets = {target: group for group in groups for target in group.targets}
        self._groups = dict(sorted(targets.items(), key=lambda item: ("re:" in item[0], item[0])))
        self._by_layer: dict[str, tuple[_Weights, _Inputs | None]] = {}
        if checked.kv_cache_scheme is not None:
            log.info("quantization_config has a kv_cache_scheme, which is ignored")
        if any(group.input_activations and group.input_activations.type == "float" for group in groups):
            log.info("quantization_config has activations in 8-bit floats, which stay in DTYPE")

    def shape(self, tensors: LayerTensors) -> tuple[int, int]:
        weights, _ = self._arguments(tensors.name)
        if "weight_packed" not in tensors:
            return tensors.shape("weight")
        packed, shape = [*tensors.shape("weight_packed")], tensors["weight_shape"].flatten()[:3].tolist()
        kind = f"{weights.type} in {weights.num_bits} bits"
        if len(shape) != 2 or packed != [shape[0], math.ceil(shape[1] * weights.num_bits / 32)] or "float" in kind:
            raise StartError(f"{tensors.name}: weight_packed {packed} is not {kind} of the shape {shape!s:.60}")
        return int(shape[0]), int(shape[1])

    def read(self, tensors: LayerTensors) -> QuantizedWeight:
        (weights, inputs), shape, order = self._arguments(tensors.name), self.shape(tensors), None
        block = weights.block(shape)
        scale, size = tensors.row_values("weight_scale", shape, block), min(block[1], shape[1])
        if "weight_packed" in tensors:
            table, middle = (INT4, 8) if weights.num_bits == 4 else (INT8, 0)
            codes = unpacked(tensors.words("weight_packed"), weights.num_bits)[:, : shape[1]]
            is_ordered = -1 in tensors.get("weight_g_idx", ())  # what the library fills it with
            order = None if is_ordered else column_order(tensors, "weight_g_idx", shape[1], size)
            codes = codes if order is None else codes[:, order]
        else:
            table, dtype = (INT8, torch.int8) if weights.type == "int" else (E4M3, torch.float8_e4m3fn)
            codes, middle = tensors.codes(dtype), 0
        zeros = middle if weights.symmetric else middle + _zeros(tensors, weights, shape)
        offset, group = scale * -zeros, None if size == shape[1] else size
        offset = offset if offset.any() else None
        return QuantizedWeight(codes, table, scale, offset, group, order, _activations(tensors, inputs))

    def _arguments(self, layer: str) -> tuple[_Weights, _Inputs | None]:
        """The arguments of a layer's weight and inputs: names go before patterns, these before classes."""
        if layer not in self._by_layer:
            kind = "Embedding" if _EMBEDDING.search(layer) else "Linear"
            group = self._groups.get(next((name for name in self._groups if self._matches(layer, name)), kind))
            if group is None or group.weights is None or any(self._matches(layer, name) for name in self._ignored):
                raise StartError(f"{layer} is quantized, but quantization_config does not say how")
            inputs = group.input_activations
            if inputs and inputs.type == "int" and not (inputs.is_supported and group.weights.type == "int"):
                raise StartError(f"{layer}: {group.weights.type} weights with {inputs} are not supported")
            self._by_layer[layer] = group.weights, inputs
        return self._by_layer[layer]

    def _matches(self, layer: str, target: str) -> bool:
        if not target.startswith("re:"):
            return layer == target
        pattern = target.removeprefix("re:")
        if len(pattern) > _MAX_PATTERN or "{" in pattern:  # counts may take any memory
            raise StartError(f"quantization_config: the pattern {pattern!r:.60} is too long, or has a count")
        try:
            return regex.match(pattern, layer, timeout=_MATCH_SECONDS) is not None
        except (regex.error, TimeoutError) as error:
            raise StartError(f"quantization_config: the pattern {pattern!r:.60}: {error}") from error


def _zeros(tensors: LayerTensors, weights: _Weights, shape: tuple[int, int]) -> Tensor:  # [out, groups]
    """The codes of zero."""
    if tensors["weight_zero_point"].dtype != torch.int32:
        return tensors.row_values("weight_zero_point", shape, weights.block(shape))
    zeros = unpacked(tensors.words("weight_zero_point").T, weights.num_bits).T[: shape[0]]
    if zeros.shape != (shape[0], -(-shape[1] // weights.block(shape)[1])):
        raise StartError(f"{tensors.name}: weight_zero_point is that of {[*zeros.shape]} groups of {[*shape]} weights")
    return zeros.float() - (1 << weights.num_bits - 1)


def _activations(tensors: LayerTensors, inputs: _Inputs | None) -> ActivationCodes | None:
    if inputs is None or inputs.type == "float":
        return None
    if inputs.dynamic:
        return ActivationCodes(per_block=False, steps=_STEPS)
    scale = tensors.row_values("input_scale", (1, 1), (1, 1)).item()
    if not 0 < scale < math.inf:
        raise StartError(f"{tensors.name}: input_scale is {scale}")
    return ActivationCodes(per_block=False, steps=_STEPS, scale=scale)
