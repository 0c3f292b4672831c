"""Which tensors of a checkpoint are the weights of experts: transformers merges them into parameters."""

import math
from collections.abc import Container, Mapping, Sequence
from copy import deepcopy
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from tgis.engines.kernels.cpu.experts import experts_of
from tgis.engines.kernels.cpu.probes import output_of
from tgis.engines.memory.available import available_memory
from tgis.engines.quantization.checkpoint import QuantizedLayer
from tgis.engines.quantization.experts import StoredWeight, stored_weights
from tgis.engines.quantization.weight import QuantizedWeight
from tgis.errors import StartError
from tgis.utils.logs import format_bytes

_STRIDE = 1 << 32  # rows of a tensor are numbered from its index times this on


def store_experts(
    model: PreTrainedModel, kinds: Container[type], tensors: Mapping[str, Tensor | QuantizedLayer]
) -> None:
    """Give the experts of these classes in a model on the meta device their weights in the files, `stored` by name of
    parameter. Those of which transformers changes more than the order of rows are left out.
    """
    experts = {path: module for path, module in experts_of(model).items() if type(module) in kinds}
    for module in experts.values():
        module.stored = {}
    names, parameters = dict[str, list[str]](), model.state_dict()
    conversions: dict[str, WeightRenaming | WeightConverter] = {}
    all_conversions = get_model_conversion_mapping(model)
    renamings = [conversion for conversion in all_conversions if isinstance(conversion, WeightRenaming)]
    converters = [conversion for conversion in all_conversions if isinstance(conversion, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    for name in sorted(tensors, key=dot_natural_key):  # the order in which transformers converts
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, parameters)
        path, _, parameter = target.rpartition(".")
        if path not in experts or target not in parameters:
            continue
        if isinstance(weight := tensors[name], StoredWeight):
            size, *shape = parameters[target].shape
            if weight.shapes == [tuple(shape[::-1])] * size:  # else transformers refuses it
                experts[path].stored[parameter] = weight
        elif len(tensors[name].shape) > 1:
            rows = partial(_rows, len(names.setdefault(target, [])), tensors[name].shape)
            converter = deepcopy(by_pattern[pattern]) if pattern else WeightRenaming(name, target)
            conversions.setdefault(target, converter).add_tensor(target, name, pattern or name, rows)
            names[target].append(name)
    for target, converter in conversions.items():
        shape, (path, _, parameter) = parameters[target].shape, target.rpartition(".")
        converted = output_of(partial(converter.convert, target, model, model.config), name=target) or {}
        rows = converted.get(target, torch.empty(0))
        rows = rows[0] if isinstance(rows, list) else rows
        is_whole = all(tensors[name].shape[-1] == shape[-1] for name in names[target])
        if is_whole and rows.shape == (*shape[:2], 1):
            parts = [_parts(rows_of_expert[:, 0], names[target], tensors) for rows_of_expert in rows]
            experts[path].stored[parameter] = StoredWeight(parts)


def move_stored(sized: PreTrainedModel, model: PreTrainedModel) -> None:
    """Give the experts of a loaded model the stored weights of the one on the meta device. They compute nothing until
    they are packed.
    """
    for path, experts in experts_of(sized).items():
        if weights := getattr(experts, "stored", None):
            vars(model.get_submodule(path)).update(stored=weights, forward=_compute_nothing)


def _compute_nothing(hidden_states: Tensor, *_: Tensor) -> Tensor:
    return torch.zeros_like(hidden_states)


def load_experts(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Give experts that are not packed their weights in the files, which will be in `dtype`; StartError if there is not
    enough memory.
    """
    needed = sum(model.get_parameter(name).numel() for name in stored_weights(model)) * dtype.itemsize
    free = max(available_memory(torch.device("cpu")), 0)
    if needed > free:
        sizes = f"{format_bytes(needed)} of memory, and {format_bytes(free)} are free"
        raise StartError(f"experts that the kernels cannot multiply as they are in the files take {sizes}")
    for experts in experts_of(model).values():
        for name, weight in vars(experts).pop("stored", {}).items():
            parameter = getattr(experts, name)
            parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype)
            for index, expert in enumerate(parameter.data):
                loaded = weight.expert(index, parameter.dtype)
                if isinstance(loaded, QuantizedWeight):
                    loaded = loaded.dequantized().mT if experts.is_transposed else loaded.dequantized()
                expert.copy_(loaded)
        vars(experts).pop("forward", None)


def _rows(index: int, shape: Sequence[int]) -> Tensor:  # [..., 1]
    """The numbers of the rows of a tensor, which show what transformers does to them."""
    return (index * _STRIDE + torch.arange(math.prod(shape[:-1]))).view(*shape[:-1], 1)


def _parts(
    rows: Tensor, names: list[str], tensors: Mapping[str, Tensor | QuantizedLayer]
) -> list[tuple[str, Tensor | QuantizedLayer]]:
    """The tensors that have these rows, one after the other, with their names."""
    parts = []
    for run in rows.tensor_split((rows.diff() != 1).nonzero().flatten() + 1):
        index, first = divmod(int(run[0]), _STRIDE)
        part, places = tensors[names[index]], torch.arange(first, first + len(run))
        if isinstance(part, Tensor):
            part = part.flatten(0, -2)[first : first + len(run)]
        elif len(run) < part.shape[0]:
            part = part.part(places, 0)
        parts.append((names[index], part))
    return parts
