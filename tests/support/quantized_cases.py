"""Test cases of the Triton kernel of quantized weights, on a GPU or interpreted: all codes, groups and activations."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tgis.engines.quantization.weight import E4M3, INT4, INT8, ActivationCodes, QuantizedWeight

GROUPS = ActivationCodes()


@dataclass(frozen=True)
class Kind:
    """A kind of weight, and how the activations are rounded that it multiplies."""

    table: Tensor
    group: int | None = None
    activations: ActivationCodes | None = None
    offset: bool = False
    dtype: torch.dtype = torch.float32
    order: bool = False

    def weight(self, outputs: int, inputs: int) -> QuantizedWeight:
        """A random one."""
        random, groups = torch.Generator().manual_seed(inputs), -(-inputs // (self.group or inputs))
        codes = torch.randint(len(self.table), (outputs, inputs), generator=random).to(torch.uint8)
        codes[self.table[codes.int()].isnan()] = 1
        scale, offset = torch.randn(2, outputs, groups, generator=random) / self.table.nan_to_num().max()
        order = torch.randperm(inputs, generator=random) if self.order else None
        scale[1:2] = 0
        given = scale.to(self.dtype), offset.to(self.dtype) if self.offset else None
        return QuantizedWeight(codes, self.table, *given, self.group, order, self.activations)


KINDS = {
    "int8": Kind(INT8, activations=GROUPS),
    "int8, plain activations": Kind(INT8),
    "int4": Kind(INT4, 32, GROUPS, offset=True, dtype=torch.bfloat16),
    "int4, plain activations": Kind(INT4, 32, offset=True, dtype=torch.bfloat16),
    "int4 of 128": Kind(INT4, 128, GROUPS, offset=True),
    "int4 in order": Kind(INT4, 64, order=True),
    "int4 of 128 in order": Kind(INT4, 128, offset=True, order=True),
    "int4 of 48": Kind(INT4, 48, ActivationCodes(steps=127.5)),
    "int8 of 16": Kind(INT8, 16, GROUPS, offset=True),
    "int8 of 16, plain activations": Kind(INT8, 16),
    "int8 by row": Kind(INT8, activations=ActivationCodes(per_block=False, steps=127.5)),
    "int8 by row in order": Kind(INT8, 64, ActivationCodes(per_block=False), offset=True, order=True),
    "int8 with fixed steps": Kind(INT8, activations=ActivationCodes(scale=0.03017)),
    "int4 of 16 by row": Kind(INT4, 16, ActivationCodes(per_block=False), dtype=torch.bfloat16),
    "fp8": Kind(E4M3),
    "fp8 of 128": Kind(E4M3, 128),
}
ONE, SEVERAL, MANY = (70, 330, 1), (64, 256, 19), (70, 300, 130)  # outputs, inputs, rows
SIZES = {"int4": MANY, "int4 of 128 in order": MANY}
SIZES |= dict.fromkeys(("int8, plain activations", "int8 by row", "int4 of 5", "fp8"), ONE)


class Case(NamedTuple):
    """A product of a layer with rows."""

    kind: Kind
    outputs: int
    inputs: int
    rows: int

    @property
    def weight(self) -> QuantizedWeight:
        return self.kind.weight(self.outputs, self.inputs)


CASES = {
    name: Case(kind, *SIZES.get(name, SEVERAL)) for name, kind in (KINDS | {"int4 of 5": Kind(INT4, 5, GROUPS)}).items()
}


def inputs_of(case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Numbers and a bias; no number is halfway between two codes."""
    draw = torch.Generator().manual_seed(case.rows)
    x = (torch.randint(-250, 251, (case.rows, case.inputs), generator=draw) / 32).to(dtype)
    x[:, ::32] = -251 / 32
    x[1:2] = 0
    return x, torch.randn(case.outputs, generator=draw).to(dtype)


def error(case: Case, device: str, dtype: torch.dtype, product: str = "quantized_product") -> float:
    """How far the product by the kernel, or another, is from that in float64, relative to the largest number."""
    from tgis.engines.kernels.cuda.quantized import TritonGemm

    weight, (x, bias) = case.weight, inputs_of(case, dtype)
    expected = weight.fake_quantized(x.double()) @ weight.dequantized().double().T
    gemm, worst = TritonGemm(weight, torch.device(device)), 0.0
    for added in (None, bias):
        found = getattr(gemm, product)(x.to(device), None if added is None else added.to(device)).cpu().double()
        wanted = expected if added is None else expected + added.double()
        worst = max(worst, ((found - wanted).abs().max() / wanted.abs().max()).item())
    return worst
