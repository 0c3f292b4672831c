"""Linear layers for the CPU: weights reordered once into oneDNN's own layout, not at every call.

On two cores this makes the linears of a step two to three times as fast at small batches, in float32 too.
"""

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES, replace_layer_number_by_wildcard

_DTYPES = (torch.float32, torch.bfloat16)


class PackedLinear(nn.Linear):  # type: ignore[misc]
    """What an `nn.Linear` computes, from a packed copy of its weight; of a sharded one, of the part that is here.

    It is one, without the weight, so that transformers can put the same communication around it.
    """

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach()
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        self.packed = torch.ops.mkldnn._reorder_linear_weight(local, None)
        self.bias = linear.bias
        self.weight = linear.weight.detach().to("meta")  # no numbers: some models look at the type

        self.operator = self.multiply  # or the same in a compiled graph

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [..., in] -> [..., out]
        """Multiply and add the bias."""
        return self.operator(x)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """The same."""
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


def pack_linears(model: PreTrainedModel) -> int:
    """Replace every plain `nn.Linear` of a CPU model in place; how many were replaced.

    A weight that is also an embedding stays where the embedding needs it.
    """
    if not torch.backends.mkldnn.is_available():
        return 0
    found = [
        (f"{path}.{name}".lstrip("."), parent, name, child)
        for path, parent in model.named_modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and _packable(child)
    ]
    for path, parent, name, child in found:
        packed = PackedLinear(child)
        if isinstance(child.weight, DTensor):
            style = ALL_PARALLEL_STYLES[model.tp_plan[replace_layer_number_by_wildcard(path)]]
            style.install_forward(packed, child.weight.device_mesh)
        setattr(parent, name, packed)
    return len(found)


def _packable(linear: nn.Linear) -> bool:
    """Not where transformers wraps something around the forward of an unsharded one, or shards without that."""
    weight, wrapped = linear.weight, "forward" in vars(linear)
    return weight.dtype in _DTYPES and weight.device.type == "cpu" and isinstance(weight, DTensor) == wrapped
