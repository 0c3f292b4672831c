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
from tgis.engines.kernels.cpu.padding import zero_padded

TILE_N = 32  # same value in gemm.h
_PAIR = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 1}  # inputs side by side in the packed weight, as there
_BY = {  # dtypes of x and the weight, and what the names of functions end with
    (torch.float32, torch.float32): "",
    (torch.float32, torch.bfloat16): "_by_bf16",
    (torch.float32, torch.float16): "_by_f16",
    (torch.bfloat16, torch.bfloat16): "",
}
_AMX_TILE_K = 32  # same value in gemm_amx.c
_COMPARED_ROWS = 1024

Gemm = Callable[[Tensor, Tensor | None], Tensor]  # x [..., in] and a bias [out] -> [..., out]
MakeGemm = Callable[[Tensor], Gemm]  # makes the GEMM of a weight [out, in]


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
    """A GEMM by gemm.c or gemm_amx.c. The bits of a row do not depend on the rows beside it. A weight in bfloat16 or
    float16 beside x in float32 gives the bits of the same weight in float32.
    """

    def __init__(
        self,
        weight: Tensor,
        kernels: CpuKernels,
        dtype: torch.dtype,
        function: str = "gemm",
        memory: HugePages | None = None,
    ) -> None:
        """`dtype`: of x, the bias and the output."""
        name, self.dtype = function_by(function, weight.dtype, dtype), dtype
        self._function = kernels.function(name, dtype, [ctypes.c_void_p] * 4 + [ctypes.c_int64] * 4)
        self._out_features, self._in_features = weight.shape
        weight = zero_padded(weight, _PAIR[weight.dtype])
        missing = -self._out_features % TILE_N
        tiles = (pad(weight, (0, 0, 0, missing)) if missing else weight).unflatten(0, (-1, TILE_N))
        pairs = tiles.unflatten(-1, (-1, _PAIR[weight.dtype]))
        packed = pairs.transpose(1, 2)  # [tiles, in / pair, tile, pair]
        self.packed = memory.copy_of(packed) if memory else packed.contiguous()

    @property
    def for_experts(self) -> tuple[str, int]:
        """The function of experts.h for this weight, and the address that it takes."""
        return function_by("multiply_expert", self.packed.dtype, self.dtype), self.packed.data_ptr()

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        assert x.dtype == self.dtype, x.dtype
        assert x.shape[-1] == self._in_features, x.shape
        x = zero_padded(x, _PAIR[self.packed.dtype]).contiguous()
        y = x.new_empty(*x.shape[:-1], self._out_features)
        pointers = x.data_ptr(), self.packed.data_ptr(), None if bias is None else bias.data_ptr(), y.data_ptr()
        rows = x.numel() // x.shape[-1]
        self._function(*pointers, rows, x.shape[-1], self._out_features, torch.get_num_threads())
        return y


def our_gemms(weight: Tensor, kernels: CpuKernels | None, dtype: torch.dtype) -> dict[str, partial[CpuGemm]]:
    """Our GEMMs that can multiply x of this dtype by this weight, by the instruction set that they use; that of gemm.c
    comes first.
    """
    if kernels is None or (dtype, weight.dtype) not in _BY:
        return {}
    made = {kernels.library_isa: partial(CpuGemm, kernels=kernels, dtype=dtype)}
    if kernels.isa == "amx" and weight.dtype == dtype == torch.bfloat16 and weight.shape[1] % _AMX_TILE_K == 0:
        made["amx"] = partial(CpuGemm, kernels=kernels, dtype=dtype, function="gemm_amx")
    return made


def smallest(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight as `dtype`, or in 16 bits that hold the same values: most models are saved in bfloat16."""
    halves = [half for x, half in _BY if x == dtype and half.itemsize < dtype.itemsize]
    if weight.dtype in halves:
        return weight
    weight = weight.to(dtype)
    for half in halves:
        parts = weight.split(_COMPARED_ROWS)
        if all(torch.equal(part.to(half).to(dtype), part) for part in parts):
            return weight.to(half)
    return weight


def function_by(name: str, weight: torch.dtype, dtype: torch.dtype) -> str:
    """The name of the variant of a function of gemm.c for a packed weight."""
    return f"{name}{_BY[dtype, weight]}"


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
