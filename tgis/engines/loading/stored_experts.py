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

from tgis.engines.kernels.cpu.experts import rows_of_experts
from tgis.engines.kernels.cpu.probes import output_of
from tgis.engines.kernels.cpu.quantized import has_kernel
from tgis.engines.memory.available import available_memory
from tgis.engines.quantization.checkpoint import QuantizedLayer
from tgis.engines.quantization.experts import StoredWeight
from tgis.engines.quantization.weight import QuantizedWeight
from tgis.errors import StartError
from tgis.utils.logs import format_bytes

log = logging.getLogger(__name__)

Tensors = Mapping[str, Tensor | QuantizedLayer]
_DIMS = 3


def store_experts(model: PreTrainedModel, paths: Collection[str], tensors: Tensors) -> dict[str, StoredWeight]:
    """The weights in the files of the experts at these paths of a model on the meta device, by name of parameter. Those
    that transformers merges to another shape are left out.
    """
    parameters, mapping = model.state_dict(), get_model_conversion_mapping(model)
    renamings = [conversion for conversion in mapping if isinstance(conversion, WeightRenaming)]
    converters = [conversion for conversion in mapping if isinstance(conversion, WeightConverter)]
    patterns: dict[str, dict[str, str | None]] = {}  # by parameter and name in the files
    for name in sorted(tensors, key=dot_natural_key):  # the order in which transformers converts
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, parameters)
        if target.rpartition(".")[0] in paths and target in parameters and parameters[target].dim() == _DIMS:
            patterns.setdefault(target, {})[name] = pattern
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    stored = {}
    for target, of_target in patterns.items():
        name, pattern = next(iter(of_target.items()))
        converter = by_pattern[pattern] if pattern else WeightRenaming(name, target)
        merge = partial(_merged, converter, model, target, of_target)
        weight = StoredWeight({name: tensors[name] for name in of_target}, merge)
        is_transposed = model.get_submodule(target.rpartition(".")[0]).is_transposed
        if output_of(_has_shape, weight, parameters[target], is_transposed, name=target):
            stored[target] = weight
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


def _has_shape(weight: StoredWeight, parameter: Tensor, is_transposed: bool) -> bool:
    """Whether a stored weight is that of a parameter. Codes are [experts * outputs, inputs]."""
    merged = weight.merge([torch.empty(part.shape, device="meta") for part in weight.parts.values()])
    if weight.is_coded:
        merged, parameter = merged.flatten(0, -2), (parameter.mT if is_transposed else parameter).flatten(0, 1)
    return merged.shape == parameter.shape


def read_experts(
    model: PreTrainedModel, dtype: torch.dtype, path: str, name: str, rows: Tensor
) -> Tensor | QuantizedWeight:
    """Some rows of a weight [experts * outputs, inputs] of the experts at a path. Codes that no kernel multiplies are
    widened to `dtype`; StartError if there is not enough memory.
    """
    experts, full_name = model.get_submodule(path), f"{path}.{name}"
    parameter, stored = getattr(experts, name).detach(), model.stored_experts.pop(full_name, None)
    weight = stored.read(dtype) if stored else parameter
    if isinstance(weight, QuantizedWeight) and has_kernel(weight) and weight.order is None:
        return weight.part(rows, 0)
    if stored and stored.is_coded:
        log.warning("%s is widened to %s: no kernel multiplies by its codes", full_name, dtype)
        needed, free = parameter.numel() * dtype.itemsize, max(available_memory(torch.device("cpu")), 0)
        if needed > free:
            sizes = f"{format_bytes(needed)} of memory, and {format_bytes(free)} are free"
            raise StartError(f"{full_name}, whose codes no kernel multiplies, takes {sizes}")
    if isinstance(weight, QuantizedWeight):
        weight = weight.widened(dtype).view(parameter.shape)
    check_finite(f"the weight {full_name}", weight, parameter.dtype)
    return rows_of_experts(experts, weight, rows)


def check_finite(name: str, weight: Tensor, dtype: torch.dtype) -> None:
    """StartError for a weight that is NaN or infinite as `dtype`: a broken file, or a type with too small a range."""
    if not torch.stack(torch.aminmax(weight)).to(dtype).isfinite().all():
        raise StartError(f"{name} has values that are NaN or infinite as {dtype}")
