"""GEMMs on CPUs: a packed copy of a weight, and the function that multiplies by this packing."""

import ctypes
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from tgis.engines.host_memory import HugePages
from tgis.engines.kernels.agreement import agrees
from tgis.engines.kernels.cpu.library import CpuKernels

_TILE_N = 32  # as in gemm.h
_PAIR = {torch.float32: 1, torch.bfloat16: 2}  # inputs side by side in the packed weight, as there
_AMX_TILE_K = 32  # as in gemm_amx.c

Gemm = Callable[[Tensor, Tensor | None], Tensor]  # x [..., in] and a bias [out] -> [..., out]
MakeGemm = Callable[[Tensor], Gemm]  # of a weight [out, in]


class OneDnnGemm:
    """A GEMM with a weight [out, in], by oneDNN. Sums may be taken in another order for another number of rows."""

    def __init__(self, weight: Tensor) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")

    @staticmethod
    def supports(weight: Tensor) -> bool:
        if not torch.backends.mkldnn.is_available():
            return False
        has_bf16: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()  # not with AVX2 alone
        return weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and has_bf16)


class CpuGemm:
    """A GEMM by gemm.c or gemm_amx.c. The bits of a row do not depend on the rows beside it."""

    def __init__(
        self, weight: Tensor, kernels: CpuKernels, function: str = "gemm", memory: HugePages | None = None
    ) -> None:
        self._function = kernels.function(function, weight.dtype, [ctypes.c_void_p] * 4 + [ctypes.c_int64] * 4)
        self._dtype, (self._out_features, self._in_features) = weight.dtype, weight.shape
        missing = -self._out_features % _TILE_N
        tiles = (pad(weight, (0, 0, 0, missing)) if missing else weight).unflatten(0, (-1, _TILE_N))
        pairs = tiles.unflatten(-1, (-1, _PAIR[weight.dtype]))
        packed = pairs.transpose(1, 2)  # [tiles, in / pair, tile, pair]
        self._packed = memory.copy_of(packed) if memory else packed.contiguous()

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        x = x.contiguous()
        assert x.dtype == self._dtype, x.dtype
        assert x.shape[-1] == self._in_features, x.shape
        y = x.new_empty(*x.shape[:-1], self._out_features)
        pointers = x.data_ptr(), self._packed.data_ptr(), None if bias is None else bias.data_ptr(), y.data_ptr()
        rows = x.numel() // self._in_features
        self._function(*pointers, rows, self._in_features, self._out_features, torch.get_num_threads())
        return y


def our_gemms(weight: Tensor, kernels: CpuKernels | None) -> dict[str, partial[CpuGemm]]:
    """Our GEMMs that can multiply by this weight, by the instruction set that they use; that of gemm.c comes first."""
    if kernels is None or weight.dtype not in _PAIR or weight.shape[1] % _PAIR[weight.dtype]:
        return {}
    made = {kernels.library_isa: partial(CpuGemm, kernels=kernels)}
    if kernels.isa == "amx" and weight.dtype == torch.bfloat16 and weight.shape[1] % _AMX_TILE_K == 0:
        made["amx"] = partial(CpuGemm, kernels=kernels, function="gemm_amx")
    return made


def is_right(
    gemm: Gemm,
    weight: Tensor,
    dtype: torch.dtype,
    fake_quantized: Callable[[Tensor], Tensor] | None = None,
) -> bool:
    """Whether a GEMM with a weight [out, in] gives the result of float64 within rounding, and the same bits for each
    row alone. A GEMM may round its input first, as `fake_quantized` does up to ties: as coarse as half precision.
    """
    generator, (outputs, size) = torch.Generator().manual_seed(1), weight.shape
    bias, x = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((outputs,), (40, size)))
    y = gemm(x, bias)
    inputs = fake_quantized(x) if fake_quantized else x
    expected = linear(inputs.double(), weight.double(), bias.double())
    alone = torch.cat([gemm(row[None], bias) for row in x])
    return torch.equal(y, alone) and agrees(y, expected, torch.bfloat16 if fake_quantized else dtype)
