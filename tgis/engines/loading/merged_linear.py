"""Merge linear layers that multiply the same input, such as the projections to queries, keys and values.

A pass of the model shows which layers they are, so that no architecture is named here.
"""

from collections.abc import Callable
from itertools import groupby

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tgis.engines.quantization.checkpoint import concatenate_layers


class MergedLinear(nn.Module):  # type: ignore[misc]
    """One layer with the weights of several. Keeps its output until the last slice has been taken."""

    def __init__(self, linear: nn.Module, sizes: list[int]) -> None:
        super().__init__()
        self.linear, self.sizes = linear, sizes
        self._input: Tensor | None = None
        self._outputs: list[Tensor] = []

    def output_slice(self, x: Tensor, index: int) -> Tensor:
        """The output of the layer of that index."""
        if self._input is not x:
            self._input, self._outputs = x, self.linear(x).split(self.sizes, -1)
        output = self._outputs[index]
        if index == len(self.sizes) - 1:
            self._input, self._outputs = None, []
        return output


class MergedLinearSlice(nn.Module):  # type: ignore[misc]
    """Replaces one of the merged layers."""

    def __init__(self, merged: MergedLinear, index: int, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.merged, self._index = merged, index

    def forward(self, x: Tensor) -> Tensor:  # [..., in] -> [..., out]
        return self.merged.output_slice(x, self._index)

    @property
    def weight(self) -> Tensor:  # [out, in]
        return self.merged.linear.weight.split(self.merged.sizes)[self._index]


Pack = Callable[[nn.Linear, str], nn.Module | None]


def merge_linears(model: PreTrainedModel, pack: Pack | None = None, **inputs: Tensor) -> None:
    """Replace layers in place. `inputs` are those of one pass of the model.

    What `pack` makes of a merged layer, if anything, takes its place before the next is merged.
    """
    for path, parent, names in _mergeable_groups(model, inputs):
        linears = [getattr(parent, name) for name in names]
        together = _concatenated(linears)
        if together is None:
            continue
        packed = pack(together, f"{path}.{names[0]}") if pack else None
        product = MergedLinear(packed or together, [len(linear.weight) for linear in linears])
        for index, (name, linear) in enumerate(zip(names, linears, strict=True)):
            setattr(parent, name, MergedLinearSlice(product, index, linear))


def _concatenated(linears: list[nn.Linear]) -> nn.Linear | None:
    """One layer with the outputs of several; None where their weights are quantized in different ways."""
    layers = [linear.quantized for linear in linears if hasattr(linear, "quantized")]
    quantized = concatenate_layers(layers) if len(layers) == len(linears) else None
    if layers and quantized is None:
        return None
    weights = [linear.weight.detach() for linear in linears]
    weight = weights[0][:1].expand(sum(map(len, weights)), -1) if quantized else torch.cat(weights)
    with torch.device("meta"):
        together = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    together.weight = nn.Parameter(weight, requires_grad=False)
    if linears[0].bias is not None:
        together.bias = nn.Parameter(torch.cat([linear.bias for linear in linears]), requires_grad=False)
    if quantized:
        together.quantized = quantized
    return together


def _mergeable_groups(model: PreTrainedModel, inputs: dict[str, Tensor]) -> list[tuple[str, nn.Module, list[str]]]:
    """Modules with their paths, and the names of children that are called one after the other with the same input."""
    calls = _record_calls(model, inputs)
    seen = [linear for linear, _ in calls]
    groups = [[linear for linear, _ in group] for _, group in groupby(calls, lambda call: id(call[1]))]
    mergeable = []
    for path, parent in model.named_modules():
        names = {child: name for name, child in parent.named_children() if type(child) is nn.Linear}
        for group in groups:
            mine = [linear for linear in group if linear in names and seen.count(linear) == 1]
            if len(mine) > 1 and _mergeable(mine):
                mergeable.append((path, parent, [names[linear] for linear in mine]))
    return mergeable


def _record_calls(model: PreTrainedModel, inputs: dict[str, Tensor]) -> list[tuple[nn.Linear, Tensor]]:
    """The plain linear layers in the order of their calls, with their inputs, kept alive so that ids stay unique."""
    calls: list[tuple[nn.Linear, Tensor]] = []
    plain = [module for module in model.modules() if type(module) is nn.Linear]
    hooks = [linear.register_forward_pre_hook(lambda linear, args: calls.append((linear, args[0]))) for linear in plain]
    with torch.inference_mode():
        model(**inputs, use_cache=False)
    for hook in hooks:
        hook.remove()
    return calls


def _mergeable(linears: list[nn.Linear]) -> bool:
    """Whether layers can be merged: their weights must be plain tensors of one kind, not quantized ones, and their
    `forward` must not be wrapped.
    """
    layouts = {(linear.weight.dtype, linear.weight.device, linear.bias is None) for linear in linears}
    plain = all(type(linear.weight) is nn.Parameter and "forward" not in vars(linear) for linear in linears)
    return plain and len(layouts) == 1
