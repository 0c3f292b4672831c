"""Linear layers of one module that multiply the same input, as those of queries, keys and values: one product for all.

Which ones they are is seen in a pass of the model, so that no architecture is named here.
"""

from itertools import groupby

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel
from transformers.integrations.tensor_parallel import replace_layer_number_by_wildcard


class MergedLinear(nn.Module):  # type: ignore[misc]
    """The outputs of sibling layers for the input that the first of them was called with; of sharded ones, the parts
    that are here.
    """

    def __init__(self, linears: list[nn.Linear]) -> None:
        super().__init__()
        weights = [_local(linear.weight) for linear in linears]
        weight = torch.cat(weights)
        bias = None if linears[0].bias is None else torch.cat([_local(linear.bias) for linear in linears])
        with torch.device("meta"):
            self.linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        self.linear.weight = nn.Parameter(weight, requires_grad=False)
        self.linear.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self._sizes = [len(weight) for weight in weights]
        self._input: Tensor | None = None
        self._outputs: list[Tensor] = []

    def output_slice(self, x: Tensor, index: int) -> Tensor:
        """What the sibling of that index gives for `x`."""
        if self._input is not x:
            self._input, self._outputs = x, self.linear(x).split(self._sizes, -1)
        output = self._outputs[index]
        if index == len(self._sizes) - 1:
            self._input, self._outputs = None, []
        return output


class MergedLinearSlice(nn.Module):  # type: ignore[misc]
    """What stands for one of the siblings."""

    def __init__(self, merged: MergedLinear, index: int, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.merged, self._index = merged, index

    def forward(self, x: Tensor) -> Tensor:  # [..., in] -> [..., out]
        """Multiply, or take what an older sibling has found."""
        return self.merged.output_slice(x, self._index)


def merge_linears(model: PreTrainedModel, **inputs: Tensor) -> int:
    """Replace siblings in place; how many. `inputs` is for one pass of the model."""
    merged = 0
    for parent, names in _mergeable_groups(model, inputs):
        linears = [getattr(parent, name) for name in names]
        product = MergedLinear(linears)
        for index, (name, linear) in enumerate(zip(names, linears, strict=True)):
            setattr(parent, name, MergedLinearSlice(product, index, linear))
        merged += len(names)
    return merged


def _mergeable_groups(model: PreTrainedModel, inputs: dict[str, Tensor]) -> list[tuple[nn.Module, list[str]]]:
    """Modules, and those of their children that are called one after the other with the same input."""
    calls = _record_calls(model, inputs)
    seen = [linear for linear, _ in calls]
    groups = [[linear for linear, _ in group] for _, group in groupby(calls, lambda call: id(call[1]))]
    plan = getattr(model, "tp_plan", None) or {}
    found = []
    for path, parent in model.named_modules():
        names = {child: name for name, child in parent.named_children() if type(child) is nn.Linear}
        styles = {child: plan.get(replace_layer_number_by_wildcard(f"{path}.{name}")) for child, name in names.items()}
        for group in groups:
            mine = [linear for linear in group if linear in names and seen.count(linear) == 1]
            if len(mine) > 1 and _same_kind(mine) and all(_mergeable(linear, styles[linear]) for linear in mine):
                found.append((parent, [names[linear] for linear in mine]))
    return found


def _record_calls(model: PreTrainedModel, inputs: dict[str, Tensor]) -> list[tuple[nn.Linear, Tensor]]:
    """The plain linear layers in the order of their calls, and the inputs, which live until all are known."""
    calls: list[tuple[nn.Linear, Tensor]] = []
    plain = [module for module in model.modules() if type(module) is nn.Linear]
    hooks = [linear.register_forward_pre_hook(lambda linear, args: calls.append((linear, args[0]))) for linear in plain]
    with torch.inference_mode():
        model(**inputs, use_cache=False)
    for hook in hooks:
        hook.remove()
    return calls


def _same_kind(linears: list[nn.Linear]) -> bool:
    """Whether their weights can be one."""
    kinds = {(type(one.weight), one.weight.dtype, one.weight.device, one.bias is None) for one in linears}
    return len(kinds) == 1


def _mergeable(linear: nn.Linear, style: str | None) -> bool:
    """Not where transformers has wrapped something around it, but what it puts around layers that are cut by their
    outputs: there each rank computes its own from the same input, and nothing else happens.
    """
    if isinstance(linear.weight, DTensor):
        return style == "colwise" and linear.weight.placements == (Shard(0),)
    return "forward" not in vars(linear)


def _local(parameter: Tensor) -> Tensor:
    detached = parameter.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached
