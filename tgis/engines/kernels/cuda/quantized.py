# mypy: disallow-untyped-decorators=False
"""Linear layers with quantized weights in Triton: one kernel for all codes, groups and batch sizes.

A program computes a tile of outputs for a tile of rows. It widens codes to the dtype of the activations in registers,
and accumulates in float32. Numbers that a weight wants in 8 bits are rounded to these before, and stay in their dtype.
"""

import math
from dataclasses import replace
from weakref import WeakValueDictionary

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from tgis.engines.kernels.cpu.linear import GemmSelector, PackedLinear, quantized_weight
from tgis.engines.kernels.cuda.attention_tile import MIN_DOT
from tgis.engines.kernels.cuda.self_test import KernelSelfTest, has_kernels
from tgis.engines.quantization.config import Quantization
from tgis.engines.quantization.weight import E4M3, GROUP, INT4, INT8, QuantizedWeight

_WIDTH = 256  # bytes: rows of codes have a multiple of them
_ZEROS = {id(INT4): 0, id(INT8): 128, id(E4M3): None}  # the code of 0; None: codes are E4M3
_ALL = 1 << 30  # columns
_PART = 1 << 24  # elements that PyTorch widens or rounds at a time, which takes some 256 to 768 MiB
_TINY = tl.constexpr(2.0**-100)  # same value in ActivationCodes
_TO_INTEGER = tl.constexpr(1.5 * 2**23)  # added to a small number, it leaves no place for a fraction

_self_test = KernelSelfTest()
_gemms: WeakValueDictionary[int, "TritonGemm"] = WeakValueDictionary()  # GEMMs by id, for compiled layers


class DeviceGemms(GemmSelector):
    """Packs layers with quantized weights for a CUDA device; all others stay as they are."""

    def __init__(self, quantization: Quantization, device: torch.device) -> None:
        super().__init__(None)
        self._how, self._device = quantization, device

    def pack(self, linear: nn.Linear, path: str, *, is_head: bool = False) -> PackedLinear | None:
        weight = quantized_weight(linear, path, self._how, is_head=is_head)
        if weight is None:
            return None
        self.counts["Triton" if has_kernels(self._device) else "PyTorch, since Triton does not serve this GPU"] += 1
        sample = TritonGemm(weight.part(torch.arange(min(64, len(weight.codes))), 0), self._device)
        for rows in (16, 32, 64, 128):  # self-tests, which would take much memory in steps with whole layers
            x = torch.randn(rows, weight.codes.shape[1], dtype=self._how.dtype, device=self._device)
            sample(x, x[0, :1].expand(sample.outputs).contiguous())
        return PackedLinear(linear, TritonGemm(weight, self._device), self._how.dtype)


class TritonGemm:
    """A GEMM with a quantized weight on a CUDA device; by PyTorch where there is no kernel, or it is not right."""

    runs_cpu_kernel = False

    def __init__(self, weight: QuantizedWeight, device: torch.device) -> None:
        self.outputs, self._inputs = weight.codes.shape
        self.rounds_inputs, self._zero = weight.activations is not None, _ZEROS[id(weight.table)]
        per_byte, self._group = 8 // weight.bits, weight.group_size or _ALL
        codes = pad(weight.codes.to(device), (0, -self._inputs % (per_byte * _WIDTH)))
        low, *high = codes.chunk(per_byte, 1)  # high halves of bytes are the last columns
        packed = low | high[0] << 4 if high else low.contiguous()
        unused = -(-codes.shape[1] // self._group) - weight.scale.shape[1]
        scale, offset = (None if x is None else pad(x.to(device), (0, unused)) for x in (weight.scale, weight.offset))
        table, order = weight.table.to(device), None if weight.order is None else weight.order.to(device)
        self._weight = replace(weight, codes=packed, table=table, scale=scale, offset=offset, order=order)
        self._id = torch.tensor([id(self)])
        _gemms[id(self)] = self

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if torch.compiler.is_compiling():  # layers share a graph, which does not know of weights
            return _product_of(self._id, x, bias, self.outputs)
        if not has_kernels(x.device):
            return self.plain_product(x, bias)
        weight = self._weight
        codes = self._zero, weight.bits, self._group, weight.scale.dtype, weight.offset is None
        kind = x.dtype, _tiles(x), codes, weight.order is None, weight.activations
        return _self_test.run(kind, TritonGemm.quantized_product, TritonGemm.plain_product, lambda y: y, self, x, bias)

    def plain_product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The product by PyTorch, which widens one part of the weight after another to the dtype of x."""
        size = max(_PART // self._inputs, 1)
        rounded = torch.cat([self._weight.fake_quantized(rows).to(x.dtype) for rows in x.split(size, -2)], -2)
        outputs = []
        for start in range(0, self.outputs, size):
            part = slice(start, start + size)
            outputs.append(linear(rounded, self._widened(part).to(x.dtype), None if bias is None else bias[part]))
        return torch.cat(outputs, -1)

    def _widened(self, part: slice) -> Tensor:  # float32 [outputs of the part, in]
        weight, codes = self._weight, self._weight.codes[part]
        codes = (torch.cat([codes & 15, codes >> 4], 1) if weight.bits == 4 else codes)[:, : self._inputs]
        offset = None if weight.offset is None else weight.offset[part]
        return replace(weight, codes=codes, scale=weight.scale[part], offset=offset).dequantized()

    def quantized_product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        weight, rows = self._weight, x.numel() // self._inputs
        block_m, block_n, block_k = _tiles(x)
        y = x.new_empty(*x.shape[:-1], self.outputs)
        sizes = rows, self.outputs, self._inputs, weight.codes.shape[1] // block_k, weight.scale.shape[1]
        _product[triton.cdiv(self.outputs, block_n), triton.cdiv(rows, block_m)](
            *(y, self._fake_quantized(x), weight.codes, weight.scale, weight.offset, bias, *sizes),
            *(weight.bits, self._zero, self._group, math.gcd(self._group, block_k), block_m, block_n, block_k),
        )
        return y

    def _fake_quantized(self, x: Tensor) -> Tensor:
        """x in the order of the columns, rounded as the weight asks."""
        how, order = self._weight.activations, self._weight.order
        x = x.contiguous() if order is None else x.index_select(-1, order)
        if how is None:
            return x
        y, block = torch.empty_like(x), max(triton.next_power_of_2(self._inputs), GROUP)
        largest, span = None if how.scale is None else how.scale * how.steps, GROUP if how.per_block else block
        _round[x.numel() // self._inputs,](y, x, self._inputs, largest, how.steps, span, block, num_warps=8)
        return y


def _tiles(x: Tensor) -> tuple[int, int, int]:
    """Rows, outputs and bytes of codes of a tile: few rows wait for memory, many for tensor cores."""
    block_m = min(max(triton.next_power_of_2(x.numel() // x.shape[-1]), MIN_DOT), 256 // x.element_size())
    return (block_m, 32, 256) if block_m == MIN_DOT else (block_m, 64, 64)


@torch.library.custom_op("tgis::quantized_product", mutates_args=())
def _product_of(gemm: Tensor, x: Tensor, bias: Tensor | None, _outputs: int) -> Tensor:
    return _gemms[int(gemm)](x, bias)  # the id is on the host


@_product_of.register_fake
def _(_gemm: Tensor, x: Tensor, _bias: Tensor | None, _outputs: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], _outputs)


@triton.jit(do_not_specialize=["rows"])
def _product(
    y: tl.tensor,
    x: tl.tensor,
    codes: tl.tensor,
    scale: tl.tensor,
    offset: tl.tensor,
    bias: tl.tensor,
    rows: tl.tensor,
    outputs: tl.tensor,
    inputs: tl.tensor,
    tiles: tl.tensor,
    groups: tl.tensor,
    bits: tl.constexpr,
    zero: tl.constexpr,
    group: tl.constexpr,
    span: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
) -> None:
    """Compute a tile of y [rows, outputs].

    `zero` is the code of 0 where codes are integers, None for E4M3.
    `span` columns of a tile of codes have the same scale.
    """
    output = tl.program_id(0) * block_n + tl.arange(0, block_n)[:, None]
    row = tl.program_id(1) * block_m + tl.arange(0, block_m)[None, :]
    is_output, is_row = output < outputs, row < rows
    own_codes, own_x = codes + output.to(tl.int64) * tiles * block_k, x + row.to(tl.int64) * inputs
    acc = tl.zeros([block_n, block_m], tl.float32)
    column, nth_span = tl.arange(0, block_k), tl.arange(0, block_k // span)
    for tile in range(tiles):
        packed = tl.load(own_codes + tile * block_k + column[None, :], mask=is_output, other=0)
        for part in tl.static_range(8 // bits):
            code = (packed >> 4 * part) & 15 if bits == 4 else packed
            nth = part * tiles + tile
            of_group = output * groups + (nth * (block_k // span) + nth_span[None, :]) // (group // span)
            if zero is not None:
                value = code.to(tl.float32) - zero
            else:  # a float16 without the lowest bits, and one bit fewer of the exponent
                half = ((code & 128).to(tl.int16) << 8) | ((code & 127).to(tl.int16) << 7)
                value = half.to(tl.float16, bitcast=True).to(tl.float32) * 256
            value = tl.reshape(value, [block_n, block_k // span, span])
            value *= tl.load(scale + of_group, mask=is_output, other=0.0).to(tl.float32)[:, :, None]
            if offset is not None:
                value += tl.load(offset + of_group, mask=is_output, other=0.0).to(tl.float32)[:, :, None]
            weight = tl.reshape(value, [block_n, block_k]).to(x.dtype.element_ty)
            of_row = nth * block_k + column[:, None]
            other = tl.load(own_x + of_row, mask=is_row & (of_row < inputs), other=0.0)
            acc = tl.dot(weight, other, acc, input_precision="ieee")
    if bias is not None:
        acc += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)
    tl.store(y + row.to(tl.int64) * outputs + output, acc.to(y.dtype.element_ty), mask=is_output & is_row)


@triton.jit
def _round(
    y: tl.tensor, x: tl.tensor, k: tl.tensor, most: tl.tensor, steps: tl.tensor, span: tl.constexpr, block: tl.constexpr
) -> None:
    """Round a row of k values as ActivationCodes do; `most` takes the place of the largest of `span` values."""
    column = tl.arange(0, block)
    place = tl.program_id(0).to(tl.int64) * k + column
    number = tl.reshape(tl.load(x + place, mask=column < k, other=0.0).to(tl.float32), [block // span, span])
    largest = tl.max(tl.abs(number), 1, keep_dims=True)
    if most is not None:
        largest = tl.zeros_like(largest) + most
    code = number / tl.where(largest == 0, 1.0, largest) * steps
    code = tl.minimum(tl.maximum(code, -128.0, tl.PropagateNan.ALL), 127.0, tl.PropagateNan.ALL)
    rounded = (code + _TO_INTEGER - _TO_INTEGER) * tl.where(largest < _TINY, 0.0, largest / steps)
    tl.store(y + place, tl.reshape(rounded, [block]).to(y.dtype.element_ty), mask=column < k)
