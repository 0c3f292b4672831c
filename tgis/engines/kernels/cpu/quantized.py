"""Linear layers with quantized weights on CPUs, by kernels in C, for activations in 8 bits or as they are."""

import ctypes
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from tgis.engines.host_memory import HugePages
from tgis.engines.kernels.cpu.gemm import is_right
from tgis.engines.kernels.cpu.library import FLOAT, INTEGER, POINTER, CpuKernels, structure
from tgis.engines.kernels.cpu.padding import zero_padded
from tgis.engines.quantization.weight import E2M1, E4M3, GROUP, INT4, INT8, ActivationCodes, QuantizedWeight

_TILE_N, _ORDER = 32, [0, 2, 1, 3]  # how codes are packed, as in codes.h
_HALF_BLOCK = 16  # inputs, as there: the size of a group is a multiple
_MAX_INPUTS = 1 << 16  # the sum of their products fits in 32 bits
_TABLES = {"int4": INT4, "int8": INT8, "fp8": E4M3, "mxfp4": E2M1}  # names for the log, in the order of codes.h
_KINDS = {id(table): (kind, name) for kind, (name, table) in enumerate(_TABLES.items())}


# `packed_codes` of codes.h.
_CodesParams = structure(
    ("codes groups", POINTER),
    ("kind group_size num_groups has_offset in_bf16 per_block", INTEGER),
    ("steps scale", FLOAT),
    ("may_use_amx", INTEGER),
)


class QuantizedGemm:
    """A GEMM with a weight as `stored` has it. By quantized_gemm.c for activations in 8 bits: the bits of a row depend
    neither on the rows beside it nor on the instruction set. Else by gemm.c, which dequantizes parts of the weight to
    the dtype of the activations.
    """

    def __init__(
        self, weight: QuantizedWeight, kernels: CpuKernels, dtype: torch.dtype, memory: HugePages | None = None
    ) -> None:
        self.dtype, (self._out_features, self._in_features) = dtype, weight.codes.shape
        self.rounds_inputs = weight.activations is not None
        inputs, missing = self._in_features + -self._in_features % GROUP, -self._out_features % _TILE_N
        codes = pad(weight.codes, (0, inputs - self._in_features, 0, missing))
        quads = codes.unflatten(0, (-1, _TILE_N)).unflatten(-1, (-1, 4)).transpose(1, 2)[..., _ORDER]
        packed = quads if weight.bits == 8 else quads[:, 0::2] | quads[:, 1::2] << 4
        size = weight.group_size or inputs
        groups = torch.stack([x for x in (weight.scale, weight.offset) if x is not None], 1)
        unused = -(-inputs // size) - groups.shape[2]
        tiles = pad(groups, (0, unused, 0, 0, 0, missing)).unflatten(0, (-1, _TILE_N))
        tiles = tiles.permute(0, 3, 2, 1)  # [tiles, groups, 1 or 2, tile]
        self._codes, self._groups = (memory.copy_of(x) if memory else x.contiguous() for x in (packed, tiles))
        self._order = weight.order
        how = weight.activations or ActivationCodes()
        self._params = _CodesParams(
            codes=self._codes.data_ptr(),
            groups=self._groups.data_ptr(),
            kind=_KINDS[id(weight.table)][0],
            group_size=size,
            num_groups=tiles.shape[1],
            has_offset=weight.offset is not None,
            in_bf16=weight.scale.dtype == torch.bfloat16,
            per_block=how.per_block and how.scale is None,
            steps=how.steps,
            scale=how.scale or 0,
            may_use_amx=isa_of(weight, kernels) == "amx",
        )
        self._address = ctypes.addressof(self._params)
        argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_int64] * 4
        name, restype = ("quantized_gemm", ctypes.c_int) if self.rounds_inputs else ("dequantizing_gemm", None)
        self._function = kernels.function(name, dtype, argtypes, restype)
        self._take_columns = kernels.function("take_columns", dtype, [ctypes.c_void_p] * 3 + [ctypes.c_int64] * 3)

    @property
    def for_experts(self) -> tuple[str, int]:
        """The function of experts.h for this weight, and the address that it takes."""
        return f"multiply_{'quantized' if self.rounds_inputs else 'dequantized'}_expert", self._address

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        x = zero_padded(self._columns(x), 1 if self.rounds_inputs else 2)  # gemm.c multiplies pairs of inputs
        y = x.new_empty(*x.shape[:-1], self._out_features)
        pointers = x.data_ptr(), self._address, None if bias is None else bias.data_ptr(), y.data_ptr()
        rows = x.numel() // x.shape[-1]
        if self._function(*pointers, rows, x.shape[-1], self._out_features, torch.get_num_threads()):
            raise MemoryError(f"{rows} rows of {x.shape[-1]} codes")
        return y

    def _columns(self, x: Tensor) -> Tensor:
        """x in the order of the columns of the weight, contiguous."""
        assert (x.dtype, x.shape[-1]) == (self.dtype, self._in_features), (x.dtype, x.shape)
        x = x.contiguous()
        if self._order is None:
            return x
        y, rows = torch.empty_like(x), x.numel() // self._in_features
        pointers = x.data_ptr(), self._order.data_ptr(), y.data_ptr()
        self._take_columns(*pointers, rows, self._in_features, torch.get_num_threads())
        return y


class PlainGemm:
    """A GEMM with a quantized weight by PyTorch, which dequantizes the weight for each product."""

    def __init__(self, weight: QuantizedWeight) -> None:
        self._weight, self.rounds_inputs = weight, weight.activations is not None

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        rounded = self._weight.fake_quantized(x).float()
        return linear(rounded, self._weight.dequantized(), None if bias is None else bias.float()).to(x.dtype)


def describe_kind(weight: QuantizedWeight) -> str:
    _, name = _KINDS[id(weight.table)]
    return f"{name} weights and {'plain' if weight.activations is None else 'int8'} activations"


def isa_of(weight: QuantizedWeight, kernels: CpuKernels) -> str:
    """The instruction set that multiplies by a weight; AMX multiplies int8 by int8, where there are several rows."""
    return kernels.isa if weight.table is INT8 and weight.activations else kernels.library_isa


def has_kernel(weight: QuantizedWeight) -> bool:
    """Whether quantized_gemm.c or gemm.c multiplies by such codes."""
    inputs, group = weight.codes.shape[1], weight.group_size
    fits = group is None or group >= inputs or group % _HALF_BLOCK == 0
    return fits and (weight.activations is None or (weight.has_integers and inputs <= _MAX_INPUTS))


def is_quantized_right(sample: QuantizedWeight, kernels: CpuKernels, dtype: torch.dtype) -> bool:
    """Whether the kernel is right for weights like this one."""
    fake_quantized = sample.fake_quantized if sample.activations else None
    return is_right(QuantizedGemm(sample, kernels, dtype), sample.dequantized(), dtype, fake_quantized)


def stored(weight: QuantizedWeight) -> QuantizedWeight:
    """A weight with group sizes that C supports, and the smallest dtype that holds its scales and offsets."""
    inputs, size = weight.codes.shape[1], weight.group_size
    groups = [x for x in (weight.scale, weight.offset) if x is not None]
    is_short = all(torch.equal(x.bfloat16().float(), x.float()) for x in groups)
    scale, *offset = [x.to(torch.bfloat16 if is_short else torch.float32) for x in groups]
    if size is None or size >= inputs:
        size = inputs + -inputs % GROUP
    elif size % GROUP and size != _HALF_BLOCK:  # a block of activations has one or two groups of the weight
        repeats, count = size // _HALF_BLOCK, -(-inputs // _HALF_BLOCK)
        scale, *offset = [x.repeat_interleave(repeats, 1)[:, :count] for x in (scale, *offset)]
        size = _HALF_BLOCK
    return replace(weight, scale=scale, offset=offset[0] if offset else None, group_size=size)


def sample_of(weight: QuantizedWeight) -> QuantizedWeight:
    """A small weight of the same kind as one of `stored`."""
    generator, group, how = torch.Generator().manual_seed(0), weight.group_size, weight.activations
    assert group is not None
    inputs = 96 if group >= weight.codes.shape[1] else min(2 * group + 14, 526)
    codes = torch.randint(len(weight.table), (70, inputs), generator=generator).to(torch.uint8)
    scale, offset = 0.5 + torch.rand(2, 70, -(-inputs // group), generator=generator).to(weight.scale.dtype)
    return QuantizedWeight(
        codes.where(weight.table[codes.int()].isfinite(), 0),
        weight.table,
        scale,
        None if weight.offset is None else offset,
        group,
        None if weight.order is None else torch.randperm(inputs, generator=generator),
        None if how is None else replace(how, scale=None if how.scale is None else 0.02),
    )
