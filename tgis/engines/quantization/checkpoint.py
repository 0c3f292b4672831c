"""Checkpoints with quantized weights: a model is loaded with placeholders for them, and each layer's codes are read
when the layer is packed, to save memory.
"""

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Protocol

import torch
from msgspec import Meta
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from tgis.engines.quantization.weight import QuantizedWeight, concatenate
from tgis.errors import StartError
from tgis.models.files import find_weights

_SCALE, _WEIGHT = re.compile("(?i)scale|scb|absmax"), re.compile(r"weight(_packed)?$")
Size = Annotated[int, Meta(ge=1)]  # type of sizes in files


@dataclass(frozen=True, slots=True)
class QuantizedLayer:
    """A linear layer of a checkpoint."""

    name: str
    shape: tuple[int, int]  # [out, in]
    num_bytes: int  # when it is packed
    read: Callable[[], QuantizedWeight]

    def checked(self) -> QuantizedWeight:
        """The weight in the files; StartError if its tensors do not fit together."""
        weight = self.read()
        if tuple(weight.codes.shape) != self.shape:
            raise StartError(f"{self.name} has {[*weight.codes.shape]} codes, not {[*self.shape]}")
        inputs = self.shape[1]
        groups = [self.shape[0], -(-inputs // (weight.group_size or inputs))]
        for kind, values in (("scale", weight.scale), ("offset", weight.offset)):
            if values is not None and [*values.shape] != groups:
                raise StartError(f"{self.name} has {[*values.shape]} {kind}s, not {groups}")
            if values is not None and not values.isfinite().all():
                raise StartError(f"{self.name} has a {kind} that is NaN or infinite")
        return weight

    def unrounded(self) -> "QuantizedLayer":
        """The layer without rounding of its activations."""
        return replace(self, read=lambda: replace(self.read(), activations=None))

    def part(self, indices: Tensor, dim: int) -> "QuantizedLayer":
        """The layer with some of its outputs (dim 0) or inputs (dim 1)."""
        outputs, inputs = (len(indices) if i == dim else size for i, size in enumerate(self.shape))
        size, read = self.num_bytes * len(indices) // self.shape[dim], lambda: self.checked().part(indices, dim)
        return replace(self, shape=(outputs, inputs), num_bytes=size, read=read)


def concatenate_layers(layers: list[QuantizedLayer]) -> QuantizedLayer | None:
    """One layer with the outputs of several; None if they are of different kinds."""
    weight = concatenate([layer.checked() for layer in layers])
    if weight is None:
        return None
    outputs, size = sum(layer.shape[0] for layer in layers), sum(layer.num_bytes for layer in layers)
    return replace(layers[0], shape=(outputs, layers[0].shape[1]), num_bytes=size, read=lambda: weight)


@dataclass(slots=True)
class QuantizedCheckpoint:
    """The tensors of a model, some of them quantized."""

    method: str
    plain: dict[str, Tensor]  # best mapped files
    layers: list[QuantizedLayer]
    embeddings: list[QuantizedLayer] = field(default_factory=list)
    _placeholders: dict[int, tuple[Tensor, QuantizedLayer]] = field(default_factory=dict)

    @property
    def tensors(self) -> dict[str, Tensor | QuantizedLayer]:
        """All tensors by name, each layer as one."""
        return self.plain | {f"{layer.name}.weight": layer for layer in self.layers}

    def find_embeddings(self, model: PreTrainedModel) -> None:
        """Set the embeddings apart from the layers. They are widened, but multiplied as codes, with activations that
        are not rounded, where they are tied to a linear layer.
        """
        names = {name for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
        self.embeddings = [layer.unrounded() for layer in self.layers if layer.name in names]
        self.layers = [layer for layer in self.layers if layer.name not in names]

    def leave_out(self, names: Collection[str]) -> None:
        """Leave out layers that are experts and have these weights; StartError for other experts."""
        self.layers = [layer for layer in self.layers if f"{layer.name}.weight" not in names]
        if left := next((layer.name for layer in self.layers if ".experts." in layer.name), None):
            needed = "the kernels for CPUs, one rank and the layout of Linear layers"
            raise StartError(f"{left}: experts quantized as {self.method} need {needed}")

    def state_dict(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """All tensors by name; those of quantized weights are zeros that take no memory."""
        tensors = dict(self.plain)
        for layer in self.layers:
            zero = torch.zeros((), dtype=dtype)
            self._placeholders[zero.data_ptr()] = zero, layer
            tensors[f"{layer.name}.weight"] = zero.expand(layer.shape)
        for layer in self.embeddings:
            tensors[f"{layer.name}.weight"] = weight = layer.checked().widened(dtype)
            self._placeholders[weight.data_ptr()] = weight, layer
        return tensors

    def attach(self, model: PreTrainedModel) -> None:
        """Give each linear layer of a loaded model its quantized weight; StartError if one is left over."""
        missing = {layer.name for layer in self.layers}
        for module in model.modules():
            if isinstance(module, nn.Linear) and module.weight.data_ptr() in self._placeholders:
                _, module.quantized = self._placeholders[module.weight.data_ptr()]
                missing.discard(module.quantized.name)
        self._placeholders.clear()  # ranks keep parts of embeddings
        if missing:
            kind = type(model).__name__
            raise StartError(f"{min(missing)} is quantized, but is no linear layer of {kind} (of {len(missing)} such)")


class LayerTensors(dict[str, Tensor]):
    """The tensors of a layer in mapped files, by the suffix after the name of the layer."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def __missing__(self, suffix: str) -> Tensor:
        raise KeyError(f"{self.name} has no {suffix}")

    def shape(self, suffix: str) -> tuple[int, int]:
        """The shape of a matrix."""
        tensor = self[suffix]
        if tensor.dim() != 2:
            raise StartError(f"{self.name}: {suffix} has the shape {[*tensor.shape]}, which is no matrix")
        return tensor.shape[0], tensor.shape[1]

    def words(self, suffix: str) -> Tensor:
        """A matrix of int32."""
        tensor = self[suffix]
        if tensor.dtype != torch.int32 or tensor.dim() != 2:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise StartError(f"{self.name}: {suffix} is {kind} {[*tensor.shape]}, not a matrix of int32")
        return tensor

    def row_values(self, suffix: str, shape: tuple[int, int], block: tuple[int, int]) -> Tensor:
        """The values of the blocks of each row of a matrix, float32 [out, groups]; the last blocks may be smaller."""
        tensor = self[suffix]
        counts = [-(-size // step) for size, step in zip(shape, block, strict=True)]
        is_number = tensor.is_floating_point() != suffix.endswith("zero_point")
        if not is_number or tensor.numel() != math.prod(counts) or (tensor.dim() > 1 and [*tensor.shape] != counts):
            kind = f"{tensor.dtype} {[*tensor.shape]}".removeprefix("torch.")
            raise StartError(f"{self.name}: {suffix} is {kind}, not {counts} numbers for {[*shape]} weights")
        return tensor.float().reshape(counts).repeat_interleave(min(block[0], shape[0]), 0)[: shape[0]]

    def codes(self, dtype: torch.dtype) -> Tensor:  # uint8 [out, in]
        """The codes of a weight in int8 or E4M3, as indices of its table."""
        weight = self["weight"]
        if weight.dtype != dtype:
            raise StartError(f"{self.name}: weight is {weight.dtype}, not {dtype}".replace("torch.", ""))
        if dtype == torch.int8:
            return weight.view(torch.uint8) ^ 128
        if weight.float().isnan().any():
            raise StartError(f"{self.name} has a weight that is NaN")
        return weight.view(torch.uint8)


class Format(Protocol):
    """How the files of a kind of checkpoint hold a quantized weight."""

    marks: frozenset[str]  # what follows the layer's name in the names of tensors: a quantized one has one of these
    others: frozenset[str]  # and may have these

    def shape(self, tensors: LayerTensors) -> tuple[int, int]:
        """[out, in], told from the shapes of the tensors."""
        return tensors.shape("weight")

    def read(self, tensors: LayerTensors) -> QuantizedWeight:
        """StartError or ValueError for tensors that do not fit together."""


def read_checkpoint(path: Path, method: str, layout: Format) -> QuantizedCheckpoint:
    """The checkpoint in the safetensors files of a directory, whose tensors stay in the files."""
    plain, by_layer = read_tensors(path, {*layout.marks, *layout.others})
    layers = []
    for tensors in by_layer.values():
        if tensors.keys().isdisjoint(layout.marks):
            for suffix, tensor in tensors.items():
                if not tensor.is_floating_point() or tensor.itemsize == 1:
                    raise StartError(f"{tensors.name}: {suffix} has codes, but no {' or '.join(sorted(layout.marks))}")
                plain[f"{tensors.name}.{suffix}"] = tensor
            continue
        size = sum(_packed_bytes(tensor) for tensor in tensors.values())
        read = lambda tensors=tensors: layout.read(tensors)  # noqa: E731
        layers.append(QuantizedLayer(tensors.name, layout.shape(tensors), size, read))
    if not layers:
        raise StartError(f"{path}: no layer is quantized as {method}")
    return QuantizedCheckpoint(method, plain, layers)


def _packed_bytes(tensor: Tensor) -> int:
    """Scales in half precision become a scale and an offset in float32, codes stay as they are."""
    return int(8 * tensor.numel() if tensor.is_floating_point() and tensor.itemsize > 1 else tensor.nbytes)


def read_tensors(path: Path, suffixes: Collection[str] = ()) -> tuple[dict[str, Tensor], dict[str, LayerTensors]]:
    """Tensors by name, which stay in the files, and those with the suffixes by layer. StartError for codes among the
    plain ones.
    """
    plain: dict[str, Tensor] = {}
    layers: dict[str, LayerTensors] = {}
    for file in find_weights(path):
        tensors: Any = safe_open(file, "pt")  # stays mapped while a tensor of it lives
        for name in tensors.keys():  # noqa: SIM118 - it is no dict
            suffix = next((suffix for suffix in suffixes if name.endswith(f".{suffix}")), None)
            layer = name.removesuffix(f".{suffix}")
            place = plain if suffix is None else layers.setdefault(layer, LayerTensors(layer))
            place[suffix or name] = tensors.get_tensor(name)
    _check_plain(plain)
    return plain, layers


def _check_plain(tensors: Mapping[str, Tensor]) -> None:
    """StartError for codes that nothing describes: integers, or values of one byte beside their scales."""
    scales = [name for name in tensors if _SCALE.search(name)]
    for name, tensor in tensors.items():
        layer = _WEIGHT.sub("", name)
        scale = next((scale for scale in scales if scale.startswith(layer) and scale != name), None)
        is_integer = layer != name and not tensor.is_floating_point()
        if is_integer or (tensor.itemsize == 1 and scale):
            kind = f"{tensor.dtype} codes".removeprefix("torch.") + (f", scaled by {scale}" if scale else "")
            raise StartError(f"{name} has {kind}, and no quantization_config says how to read them")
