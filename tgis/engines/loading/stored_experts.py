"""Experts that stay in the files of a checkpoint until they are packed: transformers merges their tensors."""

import logging
from collections.abc import Collection, Mapping
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from tgis.engines.kernels.cpu.experts import matrix_of
from tgis.engines.kernels.cpu.quantized import has_kernel
from tgis.engines.memory.available import available_memory
from tgis.engines.quantization.checkpoint import QuantizedLayer
from tgis.engines.quantization.experts import StoredWeight
from tgis.engines.quantization.weight import QuantizedWeight
from tgis.errors import StartError
from tgis.utils.logs import format_bytes

log = logging.getLogger(__name__)

Tensors = Mapping[str, Tensor | QuantizedLayer]


def store_experts(model: PreTrainedModel, paths: Collection[str], tensors: Tensors) -> dict[str, StoredWeight]:
    """The weights in the files of the experts at these paths of a model on the meta device, by name of parameter."""
    parameters, mapping = model.state_dict(), get_model_conversion_mapping(model)
    renamings = [conversion for conversion in mapping if isinstance(conversion, WeightRenaming)]
    converters = [conversion for conversion in mapping if isinstance(conversion, WeightConverter)]
    patterns: dict[str, dict[str, str | None]] = {}  # parameter -> name in the files -> pattern
    for name in sorted(tensors, key=dot_natural_key):  # the order in which transformers converts
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, parameters)
        if target.rpartition(".")[0] in paths and target in parameters and target.endswith("_proj"):
            patterns.setdefault(target, {})[name] = pattern
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    stored = {}
    for target, of_target in patterns.items():
        name, pattern = next(iter(of_target.items()))
        converter = by_pattern[pattern] if pattern else WeightRenaming(name, target)
        merge = partial(_merged, converter, model, target, of_target)
        stored[target] = StoredWeight({name: tensors[name] for name in of_target}, merge)
    return stored


def _merged(
    converter: Any, model: PreTrainedModel, target: str, patterns: Mapping[str, str | None], tensors: list[Tensor]
) -> Tensor:
    """The parameter that transformers makes of tensors with these names and patterns."""
    converter = deepcopy(converter)
    for (name, pattern), tensor in zip(patterns.items(), tensors, strict=True):
        converter.add_tensor(target, name, pattern or name, tensor)
    merged = converter.convert(target, model, model.config)[target]
    return merged[0] if isinstance(merged, list) else merged


def read_experts(
    model: PreTrainedModel, dtype: torch.dtype, path: str, name: str, rows: Tensor
) -> Tensor | QuantizedWeight:
    """Some rows of a weight [experts * outputs, inputs] of the experts at a path. Codes that no kernel multiplies are
    widened to `dtype`; StartError if there is not enough memory.
    """
    experts, full_name = model.get_submodule(path), f"{path}.{name}"
    parameter, stored = getattr(experts, name).detach(), model.stored_experts.pop(full_name, None)
    weight = stored.read(dtype) if stored else parameter
    matrix = weight if isinstance(weight, QuantizedWeight) else matrix_of(experts, weight)
    shape = (matrix.codes if isinstance(matrix, QuantizedWeight) else matrix).shape
    if shape != (expected := matrix_of(experts, torch.empty_like(parameter, device="meta")).shape):
        kind = type(model).__name__
        raise StartError(f"the weights {full_name} have the shape {[*shape]} in the files, {[*expected]} in {kind}")
    in_order = torch.equal(rows, torch.arange(shape[0]))  # else a copy
    if isinstance(matrix, QuantizedWeight) and has_kernel(matrix) and matrix.order is None:
        return matrix if in_order else matrix.part(rows, 0)
    if stored and any(isinstance(part, QuantizedLayer) for part in stored.parts.values()):
        log.warning("%s is widened to %s: no kernel multiplies by its codes", full_name, dtype)
        needed, free = parameter.numel() * dtype.itemsize, max(available_memory(torch.device("cpu")), 0)
        if needed > free:
            sizes = f"{format_bytes(needed)} of memory, and {format_bytes(free)} are free"
            raise StartError(f"{full_name}, whose codes no kernel multiplies, takes {sizes}")
    if isinstance(matrix, QuantizedWeight):
        return matrix.part(rows, 0).widened(dtype)
    check_finite(f"the weight {full_name}", matrix, parameter.dtype)
    return matrix if in_order else matrix[rows]


def check_finite(name: str, weight: Tensor, dtype: torch.dtype) -> None:
    """StartError for a weight that is NaN or infinite as `dtype`: a broken file, or a type with too small a range."""
    if not torch.stack(torch.aminmax(weight)).to(dtype).isfinite().all():
        raise StartError(f"{name} has values that are NaN or infinite as {dtype}")
