"""Quantized weights: codes, what they stand for, and the numbers that they multiply."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

GROUP = 32  # inputs; of activations as well
INT4, INT8 = torch.arange(16.0), torch.arange(-128.0, 128.0)  # tables of codes
E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
_FP4 = torch.tensor([0, 0.0625, 8, 12, 4, 6, 2, 3]) / 12  # by exponent and mantissa
FP4 = torch.cat([_FP4, -_FP4])
_NF4 = [
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453],
    [-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0],
    [0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224],
    [0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0],
]
NF4 = torch.tensor(_NF4).flatten()
_CHUNK = 1 << 20  # numbers of a weight that are quantized at a time
_TINY = 2.0**-100  # activations without larger numbers are zero


@dataclass(frozen=True, slots=True)
class ActivationCodes:
    """How numbers that a weight multiplies are rounded to codes of 8 bits."""

    per_group: bool = True  # a scale for each row and GROUP inputs, else for each row
    steps: float = 127  # multiples of the scale that the largest number is
    scale: float | None = None  # of all numbers, whatever the largest is

    def quantized(self, x: Tensor) -> Tensor:  # [..., in] -> float64
        """The numbers that are multiplied in place of these."""
        groups = pad(x.double(), (0, -x.shape[-1] % GROUP)).unflatten(-1, (-1, GROUP))
        largest = groups.abs().amax(-1, keepdim=True)
        largest = largest if self.per_group else largest.amax(-2, keepdim=True)
        scale = torch.as_tensor(
            torch.where(largest < _TINY, 0, largest / self.steps) if self.scale is None else self.scale
        )
        codes = groups / scale if self.scale is not None else groups * self.steps / _divisor(largest)
        codes = codes.round().clamp(-128, 127)
        return (codes * scale).flatten(-2)[..., : x.shape[-1]]


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight [out, in]: table[code] * scale + offset of the output and group of inputs."""

    codes: Tensor  # uint8 [out, in]
    table: Tensor  # float32 [16] or [256], one object for all weights of a kind
    scale: Tensor  # float32 or bfloat16 [out, groups]
    offset: Tensor | None = None  # the same; None: 0
    group_size: int | None = None  # columns of a group, the last may have fewer; None: all
    order: Tensor | None = None  # int64 [in], the input that each column multiplies; None: its own
    activations: ActivationCodes | None = None  # None: as they are

    @property
    def bits(self) -> int:
        return 4 if len(self.table) == len(INT4) else 8

    @property
    def has_integers(self) -> bool:
        """Whether the table is one of integers, so that products with codes of activations are exact."""
        return self.table is INT4 or self.table is INT8

    def dequantized(self) -> Tensor:  # float32 [out, in]
        inputs = self.codes.shape[1]
        values = self.table[self.codes.int()] * self._for_columns(self.scale, inputs)
        if self.offset is not None:
            values += self._for_columns(self.offset, inputs)
        return values if self.order is None else values[:, self.order.argsort()]

    def widened(self, dtype: torch.dtype) -> Tensor:  # [out, in]
        """The numbers in another dtype; takes little memory beside the result."""
        result = torch.empty(self.codes.shape, dtype=dtype)
        size = max(_CHUNK // self.codes.shape[1], 1)
        for start in range(0, len(result), size):
            rows = slice(start, start + size)
            offset = None if self.offset is None else self.offset[rows]
            part = replace(self, codes=self.codes[rows], scale=self.scale[rows], offset=offset)
            result[rows] = part.dequantized()
        return result

    def _for_columns(self, numbers: Tensor, inputs: int) -> Tensor:
        return numbers.float().repeat_interleave(self.group_size or inputs, 1)[:, :inputs]

    def numbers(self, x: Tensor) -> Tensor:  # [..., in]
        """What is multiplied in place of x, in the order of the inputs."""
        if self.activations is None:
            return x
        if self.order is None:
            return self.activations.quantized(x)
        return self.activations.quantized(x[..., self.order])[..., self.order.argsort()]


def concatenate(weights: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
    """One weight with the outputs of several; None where they are of different kinds."""
    first = weights[0]
    for other in weights[1:]:
        same_order = other.order is first.order or (
            other.order is not None and first.order is not None and torch.equal(other.order, first.order)
        )
        kinds = [
            (each.scale.dtype, each.offset is None, each.group_size, each.codes.shape[1], each.activations)
            for each in (first, other)
        ]
        if not same_order or kinds[0] != kinds[1] or other.table is not first.table:
            return None
    return replace(
        first,
        codes=torch.cat([each.codes for each in weights]),
        scale=torch.cat([each.scale for each in weights]),
        offset=None if first.offset is None else torch.cat([each.offset for each in weights]),
    )


def quantize(weight: Tensor, bits: int, activations: ActivationCodes | None = None) -> QuantizedWeight:  # [out, in]
    """Quantize a weight by rounding, to 8 bits for each output or to 4 bits for each group; takes little memory beside
    the result.
    """
    outputs, inputs = weight.shape
    codes = torch.empty(outputs, inputs, dtype=torch.uint8)
    size = max(_CHUNK // inputs, 1)
    parts = [slice(start, start + size) for start in range(0, outputs, size)]
    if bits == 8:
        scale = torch.empty(outputs, 1)
        for rows in parts:
            codes[rows], scale[rows] = _in_8_bits(weight[rows].float())
        return QuantizedWeight(codes, INT8, scale, activations=activations)
    scale, offset = torch.empty(2, outputs, -(-inputs // GROUP), dtype=torch.bfloat16)
    for rows in parts:
        padded = pad(weight[rows].float(), (0, -inputs % GROUP))
        found, scale[rows], offset[rows] = _in_4_bits(padded.unflatten(1, (-1, GROUP)))
        codes[rows] = found[:, :inputs]
    return QuantizedWeight(codes, INT4, scale, offset, GROUP, activations=activations)


def _in_8_bits(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 127
    return (weight / _divisor(scale)).round() + 128, scale


def _in_4_bits(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    low, high = (each.bfloat16().float() for each in groups.aminmax(dim=-1))
    scale = ((high - low) / 15).bfloat16().float()
    codes = (groups - low[..., None]) / _divisor(scale)[..., None]
    return codes.round().clamp(0, 15).flatten(1), scale, low


def _divisor(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 1, scale)
