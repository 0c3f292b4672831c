"""Linear layers on the CPU: weights are packed once, for our GEMM or for oneDNN's, instead of at every call."""

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES, replace_layer_number_by_wildcard

from tgis.engines.kernels.cpu.library import CpuKernels

_TILE_N = 32  # as in gemm.c
_PAIR = {torch.float32: 1, torch.bfloat16: 2}  # inputs side by side in the packed weight, as there

Gemm = Callable[[Tensor, Tensor | None], Tensor]  # x [..., in] and a bias [out] -> [..., out]


class PackedLinear(nn.Linear):  # type: ignore[misc]
    """An `nn.Linear` with a packed copy of its weight; of a sharded weight, of the local part.

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


class OneDnnGemm:
    """A GEMM with a weight [out, in], by oneDNN."""

    def __init__(self, weight: Tensor) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")


class CpuGemm:
    """The same by gemm.c. What a row gives does not depend on the rows beside it, to the last bit."""

    def __init__(self, weight: Tensor, kernels: CpuKernels) -> None:
        self._function = kernels.function("gemm", weight.dtype, [ctypes.c_void_p] * 4 + [ctypes.c_int64] * 4)
        self._dtype, (self._out_features, self._in_features) = weight.dtype, weight.shape
        missing = -self._out_features % _TILE_N
        tiles = (pad(weight, (0, 0, 0, missing)) if missing else weight).unflatten(0, (-1, _TILE_N))
        pairs = tiles.unflatten(-1, (-1, _PAIR[weight.dtype]))
        self._packed = pairs.transpose(1, 2).contiguous()  # [tiles, in / pair, tile, pair]

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        x = x.contiguous()
        assert x.dtype == self._dtype, x.dtype
        assert x.shape[-1] == self._in_features, x.shape
        y = x.new_empty(*x.shape[:-1], self._out_features)
        pointers = x.data_ptr(), self._packed.data_ptr(), None if bias is None else bias.data_ptr(), y.data_ptr()
        rows = x.numel() // self._in_features
        self._function(*pointers, rows, self._in_features, self._out_features, torch.get_num_threads())
        return y


def cpu_gemm(weight: Tensor, kernels: CpuKernels | None) -> CpuGemm | None:
    """Our GEMM with a weight [out, in], where it is the one of choice."""
    if kernels is None or weight.dtype not in kernels.gemm_dtypes or weight.shape[1] % _PAIR[weight.dtype]:
        return None
    return CpuGemm(weight, kernels)


def pack_linears(model: PreTrainedModel, kernels: CpuKernels | None) -> int:
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
        gemm = _packed_gemm(child, kernels)
        if gemm is None:
            continue
        packed = PackedLinear(child, gemm)
        if isinstance(child.weight, DTensor):
            style = ALL_PARALLEL_STYLES[model.tp_plan[replace_layer_number_by_wildcard(path)]]
            style.install_forward(packed, child.weight.device_mesh)
        setattr(parent, name, packed)
        count += 1
    return count


def _packed_gemm(linear: nn.Linear, kernels: CpuKernels | None) -> Gemm | None:
    weight = linear.weight.detach()
    local = weight.to_local() if isinstance(weight, DTensor) else weight
    return cpu_gemm(local, kernels) or (OneDnnGemm(local) if _onednn_supports(local.dtype) else None)


def _onednn_supports(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    has_bf16: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()  # not with AVX2 alone
    return dtype == torch.float32 or (dtype == torch.bfloat16 and has_bf16)


def _is_packable(linear: nn.Linear) -> bool:
    """Not where transformers wraps the forward of an unsharded layer, or shards one without wrapping it."""
    weight, is_wrapped = linear.weight, "forward" in vars(linear)
    same_dtype = linear.bias is None or linear.bias.dtype == weight.dtype
    return same_dtype and weight.device.type == "cpu" and isinstance(weight, DTensor) == is_wrapped
