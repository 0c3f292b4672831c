"""Quantized weights: codes, what they stand for, and the numbers that they multiply."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from tgis.errors import StartError

GROUP = 32  # inputs; of activations as well
INT4, INT8 = torch.arange(16.0), torch.arange(-128.0, 128.0)  # tables of codes
E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
_FP4 = torch.tensor([0, 0.0625, 8, 12, 4, 6, 2, 3]) / 12  # by exponent and mantissa
FP4 = torch.cat([_FP4, -_FP4])
NF4 = torch.tensor([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
])  # fmt: skip
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
    def alignment(self) -> int:
        """The number of columns at whose multiples parts begin."""
        return (self.group_size or 1) if self.scale.shape[1] > 1 else 1

    @property
    def kind(self) -> tuple[object, ...]:
        """All but the outputs, for comparison."""
        order = None if self.order is None else self.order.numpy().tobytes()
        numbers = self.scale.dtype, self.offset is None, self.group_size, self.codes.shape[1]
        return id(self.table), order, *numbers, self.activations

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
            rows = torch.arange(start, min(start + size, len(result)))
            result[start : start + size] = self.part(rows, 0).dequantized()
        return result

    def part(self, own: Tensor, dim: int) -> "QuantizedWeight":
        """The part for some outputs (dim 0), or for consecutive inputs (dim 1), which begin with a group."""
        groups = own if dim == 0 else (own // (self.group_size or self.codes.shape[1])).unique()
        if dim == 1 and (self.order is not None or own[0] % self.alignment):
            raise StartError(f"the inputs from {own[0]} on begin within a group of {self.group_size}")
        offset = None if self.offset is None else self.offset.index_select(dim, groups)
        scale = self.scale.index_select(dim, groups)
        return replace(self, codes=self.codes.index_select(dim, own), scale=scale, offset=offset)

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
    if len({each.kind for each in weights}) > 1:
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
    size, dtype, rounded = (inputs, torch.float32, _in_8_bits) if bits == 8 else (GROUP, torch.bfloat16, _in_4_bits)
    codes = torch.empty(outputs, inputs, dtype=torch.uint8)
    scale, offset = torch.zeros(2, outputs, -(-inputs // size), dtype=dtype)
    for start in range(0, outputs, step := max(_CHUNK // inputs, 1)):
        rows = slice(start, start + step)
        groups = pad(weight[rows].float(), (0, -inputs % size)).unflatten(1, (-1, size))
        found = rounded(groups, scale[rows], offset[rows])
        codes[rows] = found.flatten(1)[:, :inputs]
    if bits == 8:
        return QuantizedWeight(codes, INT8, scale, activations=activations)
    return QuantizedWeight(codes, INT4, scale, offset, GROUP, activations=activations)


def _in_8_bits(groups: Tensor, scale: Tensor, _: Tensor) -> Tensor:
    """Codes of [out, groups, size]; fills in the scales."""
    scale.copy_(groups.abs().amax(-1) / 127)
    return (groups / _divisor(scale)[..., None]).round() + 128


def _in_4_bits(groups: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    """Codes of [out, groups, size]; fills in the scales and offsets."""
    low, high = (each.bfloat16().float() for each in groups.aminmax(dim=-1))
    scale.copy_((high - low) / 15)
    offset.copy_(low)
    codes = (groups - low[..., None]) / _divisor(scale.float())[..., None]
    return codes.round().clamp(0, 15)


def _divisor(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 1, scale)
