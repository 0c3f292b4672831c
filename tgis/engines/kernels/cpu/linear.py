"""Linear layers on the CPU: weights are packed once instead of at every call."""

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES, replace_layer_number_by_wildcard

from tgis.engines.kernels.cpu.gemm import Gemm
from tgis.engines.kernels.cpu.gemm_selection import GemmSelector


class PackedLinear(nn.Linear):  # type: ignore[misc]
    """An `nn.Linear` with a packed copy of its weight, or of the local part of a sharded weight.

    It subclasses `nn.Linear` so that transformers installs the same communication around it.
    """

    runs_cpu_kernel = True

    def __init__(self, linear: nn.Linear, gemm: Gemm) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self.weight = linear.weight.detach().to("meta")  # some models ask for its dtype
        self._gemm = gemm

    def forward(self, x: Tensor) -> Tensor:  # [..., in] -> [..., out]
        return self._gemm(x, self.bias)


def pack_linears(model: PreTrainedModel, gemms: GemmSelector) -> int:
    """Replace the plain `nn.Linear`s of a CPU model in place; how many were replaced.

    A weight that is also an embedding stays where the embedding needs it.
    """
    found = [
        (f"{path}.{name}".lstrip("."), parent, name, child)
        for path, parent in model.named_modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and _is_packable(child)
    ]
    count = 0
    while found:  # frees each layer as soon as it is packed
        path, parent, name, child = found.pop()
        weight = child.weight.detach()
        gemm = gemms.gemm(weight.to_local() if isinstance(weight, DTensor) else weight)
        if gemm is None:
            continue
        packed = PackedLinear(child, gemm)
        if isinstance(child.weight, DTensor):
            style = ALL_PARALLEL_STYLES[model.tp_plan[replace_layer_number_by_wildcard(path)]]
            style.install_forward(packed, child.weight.device_mesh)
        setattr(parent, name, packed)
        count += 1
    return count


def _is_packable(linear: nn.Linear) -> bool:
    """Whether a layer can be replaced: not if its forward is wrapped without sharding, or sharded without wrapping."""
    weight, is_wrapped = linear.weight, "forward" in vars(linear)
    same_dtype = linear.bias is None or linear.bias.dtype == weight.dtype
    return same_dtype and weight.device.type == "cpu" and isinstance(weight, DTensor) == is_wrapped
