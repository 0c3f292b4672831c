"""Quantized weights: codes with their scales and offsets, and the rounding of the activations that they multiply."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from tgis.errors import StartError

GROUP = 32  # inputs with one scale, in int4 weights and in blocks of activations
INT4, INT8 = torch.arange(16.0), torch.arange(-128.0, 128.0)  # values by code
E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
_CHUNK = 1 << 20  # elements of a weight that are quantized at a time
_TINY = 2.0**-100  # smaller activations are zero


@dataclass(frozen=True, slots=True)
class ActivationCodes:
    """How activations are rounded to codes of 8 bits."""

    per_block: bool = True  # a scale for each row and block of GROUP inputs, else for each row
    steps: float = 127  # the largest value of a block or row, in multiples of its scale
    scale: float | None = None  # fixed, for all values

    def fake_quantized(self, x: Tensor) -> Tensor:  # [..., in] -> float64
        """x as rounded to codes: each code times its scale."""
        blocks = pad(x.double(), (0, -x.shape[-1] % GROUP)).unflatten(-1, (-1, GROUP))
        largest = blocks.abs().amax(-1, keepdim=True)
        largest = largest if self.per_block else largest.amax(-2, keepdim=True)
        scale = torch.as_tensor(
            torch.where(largest < _TINY, 0, largest / self.steps) if self.scale is None else self.scale
        )
        codes = blocks / scale if self.scale is not None else blocks * self.steps / _divisor(largest)
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
    order: Tensor | None = None  # int64 [in], the input that each column multiplies; None: they are in order
    activations: ActivationCodes | None = None  # None: not rounded

    @property
    def bits(self) -> int:
        return 4 if len(self.table) == len(INT4) else 8

    @property
    def alignment(self) -> int:
        """The number of columns at whose multiples parts begin."""
        return (self.group_size or 1) if self.scale.shape[1] > 1 else 1

    @property
    def kind(self) -> tuple[object, ...]:
        """The format, equal for weights that can be concatenated."""
        order = None if self.order is None else self.order.numpy().tobytes()
        layout = self.scale.dtype, self.offset is None, self.group_size, self.codes.shape[1]
        return id(self.table), order, *layout, self.activations

    @property
    def has_integers(self) -> bool:
        """Whether codes are integers, so that products with codes of activations are exact."""
        return self.table is INT4 or self.table is INT8

    def dequantized(self) -> Tensor:  # float32 [out, in]
        inputs = self.codes.shape[1]
        values = self.table[self.codes.int()] * self._for_columns(self.scale, inputs)
        if self.offset is not None:
            values += self._for_columns(self.offset, inputs)
        return values if self.order is None else values[:, self.order.argsort()]

    def widened(self, dtype: torch.dtype) -> Tensor:  # [out, in]
        """The dequantized weight in another dtype, made in parts to save memory."""
        result = torch.empty(self.codes.shape, dtype=dtype)
        size = max(_CHUNK // self.codes.shape[1], 1)
        for start in range(0, len(result), size):
            rows = torch.arange(start, min(start + size, len(result)))
            result[start : start + size] = self.part(rows, 0).dequantized()
        return result

    def part(self, indices: Tensor, dim: int) -> "QuantizedWeight":
        """The part for some outputs (dim 0), or for consecutive inputs (dim 1), which begin with a group."""
        groups = indices if dim == 0 else (indices // (self.group_size or self.codes.shape[1])).unique()
        if dim == 1 and (self.order is not None or indices[0] % self.alignment):
            raise StartError(f"the inputs from {indices[0]} on begin within a group of {self.group_size}")
        offset = None if self.offset is None else self.offset.index_select(dim, groups)
        scale = self.scale.index_select(dim, groups)
        return replace(self, codes=self.codes.index_select(dim, indices), scale=scale, offset=offset)

    def _for_columns(self, of_groups: Tensor, inputs: int) -> Tensor:
        return of_groups.float().repeat_interleave(self.group_size or inputs, 1)[:, :inputs]

    def fake_quantized(self, x: Tensor) -> Tensor:  # [..., in]
        """x as rounded to the activations' codes, in the order of the inputs."""
        if self.activations is None:
            return x
        if self.order is None:
            return self.activations.fake_quantized(x)
        return self.activations.fake_quantized(x[..., self.order])[..., self.order.argsort()]


def concatenate(
    weights: Sequence[QuantizedWeight], cat: Callable[[list[Tensor]], Tensor] = torch.cat
) -> QuantizedWeight | None:
    """One weight with the outputs of several; None where they are of different kinds."""
    first = weights[0]
    if len({weight.kind for weight in weights}) > 1:
        return None
    return replace(
        first,
        codes=cat([weight.codes for weight in weights]),
        scale=cat([weight.scale for weight in weights]),
        offset=None if first.offset is None else cat([weight.offset for weight in weights]),
    )


def quantize(weight: Tensor, bits: int, activations: ActivationCodes | None = None) -> QuantizedWeight:  # [out, in]
    """Quantize a weight by rounding, in parts to save memory: to 8 bits with a scale for each output, or to 4 bits with
    a scale and an offset for each group.
    """
    outputs, inputs = weight.shape
    size, dtype, rounded = (inputs, torch.float32, _in_8_bits) if bits == 8 else (GROUP, torch.bfloat16, _in_4_bits)
    codes = torch.empty(outputs, inputs, dtype=torch.uint8)
    scale, offset = torch.zeros(2, outputs, -(-inputs // size), dtype=dtype)
    for start in range(0, outputs, step := max(_CHUNK // inputs, 1)):
        rows = slice(start, start + step)
        groups = pad(weight[rows].float(), (0, -inputs % size)).unflatten(1, (-1, size))
        codes[rows] = rounded(groups, scale[rows], offset[rows]).flatten(1)[:, :inputs]
    if bits == 8:
        return QuantizedWeight(codes, INT8, scale, activations=activations)
    return QuantizedWeight(codes, INT4, scale, offset, GROUP, activations=activations)


def _in_8_bits(groups: Tensor, scale: Tensor, _: Tensor) -> Tensor:
    """Codes of [out, groups, size]; fills in the scales."""
    scale.copy_(groups.abs().amax(-1) / 127)
    return (groups / _divisor(scale)[..., None]).round() + 128


def _in_4_bits(groups: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    """Codes of [out, groups, size]; fills in the scales and offsets."""
    low, high = (bound.bfloat16().float() for bound in groups.aminmax(dim=-1))
    scale.copy_((high - low) / 15)
    offset.copy_(low)
    codes = (groups - low[..., None]) / _divisor(scale.float())[..., None]
    return codes.round().clamp(0, 15)


def _divisor(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 1, scale)
