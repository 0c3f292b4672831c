"""Linear layers with quantized weights on CPUs: codes of 8 bits with a scale for each output, or of 4 bits with a scale
and an offset for each group of 32 inputs. They multiply numbers that are quantized to 8 bits themselves, or are as
they were.
"""

import ctypes
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from tgis.engines.host_memory import HugePages
from tgis.engines.kernels.cpu.gemm import Gemm, is_right
from tgis.engines.kernels.cpu.library import DTYPES, CpuKernels
from tgis.engines.quantization import Quantization

log = logging.getLogger(__name__)

_GROUP = 32  # inputs, as in codes.h
_TILE_N, _ORDER = 32, [0, 2, 1, 3]  # how codes are packed, as there
_TILE_M = 8  # rows that quantized_gemm.c computes together, at the most
_ZERO = 128  # the code of 8 bits that means 0
_CHUNK = 1 << 20  # numbers of a weight that are quantized at a time
_TINY = 2.0**-100  # a group of activations without larger numbers is zero


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """(codes - 128) * scale, or codes * scale + offset of the group."""

    bits: int
    codes: Tensor  # uint8 [out, in up to a multiple of a group]
    scale: Tensor  # 8 bits: float32 [out]; 4 bits: bfloat16 [out, groups]
    offset: Tensor | None  # of 4 bits, the same
    in_features: int

    def dequantized(self) -> Tensor:  # float32 [out, in]
        if self.offset is None:
            values = (self.codes.float() - _ZERO) * self.scale[:, None]
        else:
            groups = self.codes.float().unflatten(1, (-1, _GROUP))
            values = (groups * self.scale.float()[..., None] + self.offset.float()[..., None]).flatten(1)
        return values[:, : self.in_features]


def quantize(weight: Tensor, bits: int) -> QuantizedWeight:  # [out, in]
    """Quantize it by rounding; takes little memory beside the result."""
    outputs, inputs = weight.shape
    groups = -(-inputs // _GROUP)
    codes, offset = torch.empty(outputs, groups * _GROUP, dtype=torch.uint8), None
    scale = torch.empty(outputs)
    if bits == 4:
        scale, offset = torch.empty(2, outputs, groups, dtype=torch.bfloat16)
    size = max(_CHUNK // inputs, 1)
    for start in range(0, outputs, size):
        rows = slice(start, start + size)
        part = pad(weight[rows].float(), (0, -inputs % _GROUP))
        if offset is None:
            codes[rows], scale[rows] = _in_8_bits(part)
        else:
            codes[rows], scale[rows], offset[rows] = _in_4_bits(part.unflatten(1, (-1, _GROUP)))
    return QuantizedWeight(bits, codes, scale, offset, inputs)


def _in_8_bits(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = weight.abs().amax(1) / (_ZERO - 1)
    return (weight / _divisor(scale)[:, None]).round() + _ZERO, scale


def _in_4_bits(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    low, high = (each.bfloat16().float() for each in groups.aminmax(dim=-1))
    scale = ((high - low) / 15).bfloat16().float()
    codes = (groups - low[..., None]) / _divisor(scale)[..., None]
    return codes.round().clamp(0, 15).flatten(1), scale, low


def _divisor(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 1, scale)


def quantized_activations(x: Tensor) -> Tensor:  # [..., in] -> float64
    """The numbers that are multiplied: multiples of 1/127 of the largest of each row and group."""
    groups = pad(x.double(), (0, -x.shape[-1] % _GROUP)).unflatten(-1, (-1, _GROUP))
    largest = groups.abs().amax(-1, keepdim=True)
    scale = torch.where(largest < _TINY, 0, largest / 127)
    return ((groups / _divisor(scale)).round() * scale).flatten(-2)[..., : x.shape[-1]]


class PackedCodes:
    """What codes.h calls packed codes."""

    def __init__(self, weight: QuantizedWeight, dtype: torch.dtype) -> None:
        self._dtype, self._in_features, self._out_features = dtype, weight.in_features, len(weight.scale)
        missing = -self._out_features % _TILE_N
        codes = pad(weight.codes, (0, 0, 0, missing)) if missing else weight.codes
        quads = codes.unflatten(0, (-1, _TILE_N)).unflatten(-1, (-1, 4)).transpose(1, 2)[..., _ORDER]
        self._codes = quads if weight.bits == 8 else quads[:, 0::2] | quads[:, 1::2] << 4
        self._codes, self._scale, self._ranges = self._codes.contiguous(), weight.scale, None
        if weight.offset is None:
            self._scale = pad(weight.scale, (0, missing))
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
        self._row_bytes = weight.codes.shape[1] // _GROUP * (8 + _GROUP * code_bytes)

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

    def __init__(self, weight: QuantizedWeight, *, activations: bool) -> None:
        self._weight, self.rounds_inputs = weight, activations

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        numbers = quantized_activations(x) if self.rounds_inputs else x
        return linear(numbers.float(), self._weight.dequantized(), None if bias is None else bias.float()).to(x.dtype)


class QuantizedGemms:
    """Makes the GEMM for each weight: ours if it is right on this CPU."""

    def __init__(self, kernels: CpuKernels | None, how: Quantization) -> None:
        self.how = how
        self._kernels = kernels if how.dtype in DTYPES else None
        self._makers: dict[int, tuple[str, Callable[[QuantizedWeight], Gemm]]] = {}  # by bits

    def gemm(self, weight: Tensor, bits: int) -> tuple[str, Gemm]:
        """A GEMM with a weight [out, in], and what multiplies."""
        if bits not in self._makers:
            self._makers[bits] = self._maker(bits)
        name, make = self._makers[bits]
        return name, make(quantize(weight, bits))

    def _maker(self, bits: int) -> tuple[str, Callable[[QuantizedWeight], Gemm]]:
        how, kernels = self.how, self._kernels
        kind = f"int{bits} weights and {'int8' if how.activations else 'plain'} activations"
        if kernels is not None:
            make = partial(QuantizedGemm if how.activations else WidenedGemm, kernels=kernels, dtype=how.dtype)
            if is_right(lambda weight: make(quantize(weight, bits)), how.dtype, partial(_effective, how, bits)):
                return f"{kind} by {kernels.library_isa}", make
            log.warning("CPU kernels: linear layers with %s in %s are wrong on this CPU, and off", kind, how.dtype)
        return f"{kind} by PyTorch", partial(PlainGemm, activations=how.activations)


def _effective(how: Quantization, bits: int, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """What is multiplied in place of these."""
    return quantized_activations(x) if how.activations else x, quantize(weight, bits).dequantized()
