"""Linear layers with quantized weights on CPUs: codes of 8 bits with a scale for each output, or of 4 bits with a scale
and an offset for each group of 32 inputs. They multiply numbers that are quantized to 8 bits themselves, or are as
they were.
"""

import ctypes
import logging
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from tgis.engines.host_memory import HugePages
from tgis.engines.kernels.cpu.gemm import Gemm, is_right
from tgis.engines.kernels.cpu.library import DTYPES, CpuKernels
from tgis.engines.quantization.weight import GROUP, INT4, INT8, QuantizedWeight, quantize

log = logging.getLogger(__name__)

_TILE_N, _ORDER = 32, [0, 2, 1, 3]  # how codes are packed, as in codes.h
_TILE_M = 8  # rows that quantized_gemm.c computes together, at the most


class PackedCodes:
    """What codes.h calls packed codes."""

    def __init__(self, weight: QuantizedWeight, dtype: torch.dtype) -> None:
        self._dtype, (self._out_features, self._in_features) = dtype, weight.codes.shape
        missing = -self._out_features % _TILE_N
        codes = pad(weight.codes, (0, -self._in_features % GROUP, 0, missing))
        quads = codes.unflatten(0, (-1, _TILE_N)).unflatten(-1, (-1, 4)).transpose(1, 2)[..., _ORDER]
        self._codes = quads if weight.bits == 8 else quads[:, 0::2] | quads[:, 1::2] << 4
        self._codes, self._scale, self._ranges = self._codes.contiguous(), weight.scale[:, 0], None
        if weight.offset is None:
            self._scale = pad(self._scale, (0, missing))
        else:  # [tiles, groups, 2, tile]
            ranges = pad(torch.stack([weight.scale, weight.offset], 1), (0, 0, 0, 0, 0, missing))
            self._ranges = ranges.unflatten(0, (-1, _TILE_N)).permute(0, 3, 2, 1).contiguous()
            self._scale = torch.empty(0)

    def move_to(self, memory: HugePages) -> None:
        self._codes = memory.copy_of(self._codes)
        if self._ranges is not None:
            self._ranges = memory.copy_of(self._ranges)

    def _run(self, function: Callable[..., object], x: Tensor, bias: Tensor | None, *others: Tensor) -> Tensor:
        y = x.new_empty(*x.shape[:-1], self._out_features)
        tensors = x, self._codes, self._ranges, self._scale, bias, y, *others
        pointers = (None if each is None else each.data_ptr() for each in tensors)
        rows = x.numel() // x.shape[-1]
        function(*pointers, rows, x.shape[-1], self._out_features, torch.get_num_threads())
        return y


class QuantizedGemm(PackedCodes):
    """A GEMM by quantized_gemm.c. The bits of a row depend neither on the rows beside it nor on the instruction set."""

    rounds_inputs = True

    def __init__(self, weight: QuantizedWeight, kernels: CpuKernels, dtype: torch.dtype) -> None:
        super().__init__(weight, dtype)
        self._function = kernels.function("quantized_gemm", dtype, [ctypes.c_void_p] * 7 + [ctypes.c_int64] * 4)
        code_bytes = 1 if kernels.library_isa == "avx512_bf16" else 2
        self._row_bytes = -(-weight.codes.shape[1] // GROUP) * (8 + GROUP * code_bytes)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        assert (x.dtype, x.shape[-1]) == (self._dtype, self._in_features), (x.dtype, x.shape)
        rows = x.numel() // self._in_features + _TILE_M
        return self._run(self._function, x.contiguous(), bias, torch.empty(rows * self._row_bytes, dtype=torch.uint8))


class WidenedGemm(PackedCodes):
    """A GEMM by gemm.c, whose weights are widened to the dtype of the activations a block at a time."""

    def __init__(self, weight: QuantizedWeight, kernels: CpuKernels, dtype: torch.dtype) -> None:
        super().__init__(weight, dtype)
        self._function = kernels.function("widened_gemm", dtype, [ctypes.c_void_p] * 6 + [ctypes.c_int64] * 4)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        assert (x.dtype, x.shape[-1]) == (self._dtype, self._in_features), (x.dtype, x.shape)
        return self._run(self._function, (pad(x, (0, 1)) if self._in_features % 2 else x).contiguous(), bias)


class PlainGemm:
    """A GEMM with a quantized weight by PyTorch, which widens the weight anew for each product."""

    def __init__(self, weight: QuantizedWeight) -> None:
        self._weight, self.rounds_inputs = weight, weight.activations is not None

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        numbers = self._weight.numbers(x).float()
        return linear(numbers, self._weight.dequantized(), None if bias is None else bias.float()).to(x.dtype)


class QuantizedGemms:
    """Makes the GEMM for each weight: ours if it is right on this CPU."""

    def __init__(self, kernels: CpuKernels | None, dtype: torch.dtype) -> None:
        self._kernels, self._dtype = kernels if dtype in DTYPES else None, dtype
        self._makers: dict[tuple[int, bool], tuple[str, Callable[[QuantizedWeight], Gemm]]] = {}

    def gemm(self, weight: QuantizedWeight) -> tuple[str, Gemm]:
        """A GEMM with a weight, and what multiplies."""
        if not _is_ours(weight):
            return f"{_kind(weight)} by PyTorch", PlainGemm(weight)
        key = weight.bits, weight.activations is not None
        if key not in self._makers:
            self._makers[key] = self._maker(weight)
        name, make = self._makers[key]
        return name, make(weight)

    def _maker(self, weight: QuantizedWeight) -> tuple[str, Callable[[QuantizedWeight], Gemm]]:
        kernels, kind = self._kernels, _kind(weight)
        if kernels is not None:
            make = partial(
                WidenedGemm if weight.activations is None else QuantizedGemm, kernels=kernels, dtype=self._dtype
            )
            like = partial(quantize, bits=weight.bits, activations=weight.activations)
            effective: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = lambda x, plain: (  # noqa: E731
                like(plain).numbers(x),
                like(plain).dequantized(),
            )
            if is_right(lambda plain: make(like(plain)), self._dtype, effective):
                return f"{kind} by {kernels.library_isa}", make
            log.warning("CPU kernels: linear layers with %s in %s are wrong on this CPU, and off", kind, self._dtype)
        return f"{kind} by PyTorch", PlainGemm


def _kind(weight: QuantizedWeight) -> str:
    codes = f"int{weight.bits}" if weight.has_integers else f"{weight.bits}-bit"
    return f"{codes} weights and {'plain' if weight.activations is None else 'int8'} activations"


def _is_ours(weight: QuantizedWeight) -> bool:
    """Whether quantized_gemm.c or gemm.c multiplies by such codes."""
    activations, bfloat16 = weight.activations, weight.scale.dtype == torch.bfloat16
    if weight.order is not None or (activations and (not activations.per_group or activations.scale is not None)):
        return False
    if weight.table is INT8:
        return weight.group_size is None and weight.offset is None
    return weight.table is INT4 and weight.group_size == GROUP and weight.offset is not None and bfloat16
