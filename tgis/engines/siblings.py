"""Linear layers of one module that multiply the same input, as those of queries, keys and values: one product for all.

Which ones they are is seen in a pass of the model, so that no architecture is named here.
"""

from itertools import groupby

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel


class Siblings(nn.Module):  # type: ignore[misc]
    """The outputs of sibling layers for the input that the first of them was called with."""

    def __init__(self, linears: list[nn.Linear]) -> None:
        super().__init__()
        weight = torch.cat([linear.weight.detach() for linear in linears])
        bias = None if linears[0].bias is None else torch.cat([linear.bias.detach() for linear in linears])
        with torch.device("meta"):
            self.linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        self.linear.weight = nn.Parameter(weight, requires_grad=False)
        self.linear.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self._sizes = [linear.out_features for linear in linears]
        self._input: Tensor | None = None
        self._outputs: list[Tensor] = []

    def part(self, x: Tensor, index: int) -> Tensor:
        """What the sibling of that index gives for `x`."""
        if self._input is not x:
            self._input, self._outputs = x, self.linear(x).split(self._sizes, -1)
        output = self._outputs[index]
        if index == len(self._sizes) - 1:
            self._input, self._outputs = None, []
        return output


class Part(nn.Module):  # type: ignore[misc]
    """What stands for one of the siblings."""

    def __init__(self, product: Siblings, index: int, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.product, self._index = product, index

    def forward(self, x: Tensor) -> Tensor:  # [..., in] -> [..., out]
        """Multiply, or take what an older sibling has found."""
        return self.product.part(x, self._index)


def merge_siblings(model: PreTrainedModel, **inputs: Tensor) -> int:
    """Replace siblings in place; how many. `inputs` is for one pass of the model."""
    merged = 0
    for parent, names in _siblings(model, inputs):
        linears = [getattr(parent, name) for name in names]
        product = Siblings(linears)
        for index, (name, linear) in enumerate(zip(names, linears, strict=True)):
            setattr(parent, name, Part(product, index, linear))
        merged += len(names)
    return merged


def _siblings(model: PreTrainedModel, inputs: dict[str, Tensor]) -> list[tuple[nn.Module, list[str]]]:
    """Modules, and those of their children that are called one after the other with the same input."""
    calls = _calls(model, inputs)
    seen = [linear for linear, _ in calls]
    groups = [[linear for linear, _ in group] for _, group in groupby(calls, lambda call: id(call[1]))]
    found = []
    for parent in model.modules():
        names = {child: name for name, child in parent.named_children() if type(child) is nn.Linear}
        for group in groups:
            mine = [linear for linear in group if linear in names and seen.count(linear) == 1]
            if len(mine) > 1 and _alike(mine):
                found.append((parent, [names[linear] for linear in mine]))
    return found


def _calls(model: PreTrainedModel, inputs: dict[str, Tensor]) -> list[tuple[nn.Linear, Tensor]]:
    """The plain linear layers in the order of their calls, and the inputs, which live until all are known."""
    calls: list[tuple[nn.Linear, Tensor]] = []
    plain = [module for module in model.modules() if type(module) is nn.Linear]
    hooks = [linear.register_forward_pre_hook(lambda linear, args: calls.append((linear, args[0]))) for linear in plain]
    with torch.inference_mode():
        model(**inputs, use_cache=False)
    for hook in hooks:
        hook.remove()
    return calls


def _alike(linears: list[nn.Linear]) -> bool:
    """Whether their weights can be one: not where transformers has cut them, or wrapped something around them."""
    kinds = {(linear.weight.dtype, linear.weight.device, linear.bias is None) for linear in linears}
    return len(kinds) == 1 and not any(
        isinstance(linear.weight, DTensor) or "forward" in vars(linear) for linear in linears
    )
