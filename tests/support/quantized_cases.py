"""Test cases of the Triton kernel of quantized weights, on a GPU or interpreted: all codes, groups and activations."""

from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from tgis.engines.quantization.weight import E4M3, FP4, INT4, INT8, NF4, ActivationCodes, QuantizedWeight

GROUPS = ActivationCodes()
BY_ROW, FIXED = ActivationCodes(per_group=False, steps=127.5), ActivationCodes(scale=0.03017)
ONE, SEVERAL, MANY = (70, 330, 1), (64, 256, 19), (70, 300, 130)  # outputs, inputs, rows
CASES: dict[str, tuple[Any, ...]] = {  # table, group, dtype of scales, offsets, order, activations; size
    "int8": (INT8, None, torch.float32, False, False, GROUPS, SEVERAL),
    "int8, plain activations": (INT8, None, torch.float32, False, False, None, ONE),
    "int8 of 16": (INT8, 16, torch.float32, True, False, None, SEVERAL),
    "int8 by row": (INT8, None, torch.float32, False, False, BY_ROW, ONE),
    "int8 by row in order": (INT8, 64, torch.float32, True, True, BY_ROW, SEVERAL),
    "int8 with fixed steps": (INT8, None, torch.float32, False, False, FIXED, SEVERAL),
    "int4": (INT4, 32, torch.float32, True, False, GROUPS, MANY),
    "int4, plain activations": (INT4, 32, torch.float32, True, False, None, ONE),
    "int4 of 128 in order": (INT4, 128, torch.float32, True, True, None, MANY),
    "int4 of 48": (INT4, 48, torch.float32, True, False, None, SEVERAL),
    "int4 of 5": (INT4, 5, torch.float32, False, False, GROUPS, ONE),
    "nf4": (NF4, 64, torch.float32, False, False, None, SEVERAL),
    "fp4": (FP4, 64, torch.float32, True, False, None, ONE),
    "fp8": (E4M3, None, torch.float32, False, False, None, ONE),
    "fp8 of 128": (E4M3, 128, torch.float32, False, False, None, SEVERAL),
}


def weight_of(case: tuple[Any, ...]) -> QuantizedWeight:
    table, group, dtype, has_offset, has_order, activations, (outputs, inputs, _) = case
    draw = torch.Generator().manual_seed(inputs)
    codes = torch.randint(len(table), (outputs, inputs), generator=draw).to(torch.uint8)
    codes[table[codes.int()].isnan()] = 1
    scale, offset = torch.randn(2, outputs, -(-inputs // (group or inputs)), generator=draw) / table.nan_to_num().max()
    order = torch.randperm(inputs, generator=draw) if has_order else None
    given = scale.to(dtype), offset.to(dtype) if has_offset else None
    return QuantizedWeight(codes, table, *given, group, order, activations)


def inputs_of(case: tuple[Any, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Numbers and a bias; no number is halfway between two codes."""
    outputs, inputs, rows = case[-1]
    draw = torch.Generator().manual_seed(rows)
    x = (torch.randint(-250, 251, (rows, inputs), generator=draw) / 32).to(dtype)
    x[:, ::32] = -251 / 32
    x[1:2] = 0
    return x, torch.randn(outputs, generator=draw).to(dtype)


def error(case: tuple[Any, ...], device: str, dtype: torch.dtype) -> float:
    """How far the kernel's product is from that in float64, relative to the largest number."""
    from tgis.engines.kernels.cuda.quantized import TritonGemm

    weight, (x, bias) = weight_of(case), inputs_of(case, dtype)
    expected = weight.numbers(x.double()) @ weight.dequantized().double().T
    gemm, worst = TritonGemm(weight, torch.device(device)), 0.0
    for added in (None, bias):
        found = gemm.quantized_product(x.to(device), None if added is None else added.to(device)).cpu().double()
        wanted = expected if added is None else expected + added.double()
        worst = max(worst, ((found - wanted).abs().max() / wanted.abs().max()).item())
    return worst


def compiled(device: str) -> dict[str, int]:
    """Layers with steps of their own for activations and several numbers of rows: how many graphs are compiled for
    them, and how many outputs are wrong.
    """
    from tgis.engines.kernels.cpu.linear import PackedLinear
    from tgis.engines.kernels.cuda.quantized import TritonGemm

    counter, wrong = CompileCounter(), 0
    for scale in (0.03, 0.04, 0.05):
        case = *CASES["int8 with fixed steps"][:-2], ActivationCodes(scale=scale), SEVERAL
        weight, plain = weight_of(case), nn.Linear(256, 64, device=device)
        layer = nn.Sequential(PackedLinear(plain, TritonGemm(weight, torch.device(device)), torch.float32), nn.ReLU())
        layer.compile(backend=counter, dynamic=True, fullgraph=True)
        for rows in (3, 19, 40):
            x, bias = inputs_of((*case[:-1], (64, 256, rows)), torch.float32)
            plain.bias.data.copy_(bias)
            expected = (weight.numbers(x.double()) @ weight.dequantized().double().T + bias.double()).relu()
            with torch.inference_mode():
                found = layer(x.to(device)[None])[0].cpu()
            wrong += int((found - expected).abs().max() > 1e-4 * expected.abs().max())
    return {"graphs": counter.frame_count, "wrong": wrong}
