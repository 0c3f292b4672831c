"""Quantized linear layers against their definition in float64, one number after the other; the same bits for a row
whatever is beside it and under every instruction set.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from cpu_kernels import kernels_of, num_threads
from torch import Tensor, nn

from tgis.engines.kernels.cpu.library import ISAS as FLAGS
from tgis.engines.kernels.cpu.library import cpu_flags
from tgis.engines.kernels.cpu.linear import GemmSelector
from tgis.engines.kernels.cpu.quantized import PlainGemm, QuantizedGemm, WidenedGemm
from tgis.engines.quantization.config import Quantization
from tgis.engines.quantization.weight import ActivationCodes, quantize

ISAS = ["generic", "avx2", "avx512", "avx512_bf16"]
SIZES = [(2, 1), (33, 5), (96, 70), (576, 31), (577, 33), (1540, 5)]
ERROR = {torch.float32: 1e-5, torch.bfloat16: 8e-3}
ACTIVATIONS = {True: ActivationCodes(), False: None}
KINDS = [(8, True), (4, True), (8, False), (4, False)]  # bits, activations in 8 bits


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    torch.manual_seed(7)
    with torch.no_grad():
        yield


def rounded(number: Any) -> np.float32:
    """To bfloat16."""
    return np.float32(torch.tensor(number, dtype=torch.bfloat16).item())


def groups_of(row: list[float]) -> Iterator[list[np.float32]]:
    """Groups of 32 numbers, the last filled up with zeros."""
    for start in range(0, len(row), 32):
        yield [np.float32(each) for each in (row[start : start + 32] + [0.0] * 32)[:32]]


def oracle_weight(weight: Tensor, bits: int) -> Tensor:
    """What the codes of a weight stand for."""
    found = []
    for row in weight.tolist():
        scale = np.float32(max(map(abs, row))) / np.float32(127) or np.float32(1)
        values: list[float] = []
        for group in groups_of(row):
            if bits == 8:
                values += [round(float(w / scale)) * float(scale) for w in group]
            else:
                low = rounded(min(group))
                step = rounded((rounded(max(group)) - low) / np.float32(15)) or np.float32(1)
                values += [min(max(round(float((w - low) / step)), 0), 15) * float(step) + float(low) for w in group]
        found.append(values[: len(row)])
    return torch.tensor(found, dtype=torch.float64)


def oracle_activations(x: Tensor) -> Tensor:
    found = []
    for row in x.tolist():
        values: list[float] = []
        for group in groups_of(row):
            largest = max(map(abs, group))
            factor = float(np.float32(127) / largest) if largest else 0.0
            values += [round(float(each) * factor) * float(largest / np.float32(127)) for each in group]
        found.append(values[: len(row)])
    return torch.tensor(found, dtype=torch.float64)


def oracle(x: Tensor, weight: Tensor, bits: int, activations: bool) -> Tensor:
    return (oracle_activations(x) if activations else x.double()) @ oracle_weight(weight, bits).T


def gemm(weight: Tensor, bits: int, activations: bool, isa: str, dtype: torch.dtype) -> QuantizedGemm | WidenedGemm:
    kind = QuantizedGemm if activations else WidenedGemm
    return kind(quantize(weight, bits, ACTIVATIONS[activations]), kernels_of(isa), dtype)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize(("bits", "activations"), KINDS)
def test_layers_are_their_definition(bits: int, activations: bool, dtype: torch.dtype, isa: str) -> None:
    for inputs, outputs in SIZES:
        weight, bias, x = (
            torch.randn(outputs, inputs),
            torch.randn(outputs).to(dtype),
            torch.randn(11, inputs).to(dtype),
        )
        weight[1:2], x[1] = 0, 0
        product = oracle(x, weight, bits, activations)
        for each in (bias, None):
            expected = product if each is None else product + each.double()
            assert error(gemm(weight, bits, activations, isa, dtype)(x, each), expected) < ERROR[dtype]
            assert error(PlainGemm(quantize(weight, bits, ACTIVATIONS[activations]))(x, each), expected) < ERROR[dtype]


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize(("bits", "activations"), KINDS)
def test_no_row_depends_on_others_or_on_the_instruction_set(bits: int, activations: bool, dtype: torch.dtype) -> None:
    weight, bias = torch.randn(100, 330), torch.randn(100).to(dtype)
    x = (torch.randn(70, 330) * torch.logspace(-30, 30, 70)[:, None]).to(dtype)
    every_isa = []
    for isa in ISAS:
        if not FLAGS[isa] <= cpu_flags():
            continue  # the others are worth a test nevertheless
        layer = gemm(weight, bits, activations, isa, dtype)
        rows = torch.cat([layer(row[None], bias) for row in x])
        every_isa.append(rows)
        for threads in (1, 2, 5):
            with num_threads(threads):
                for count in (2, 9, 33, 70):
                    assert torch.equal(layer(x[:count], bias), rows[:count])
        assert torch.equal(layer(x.view(7, 10, 330), bias).view(70, 100), rows)
        assert layer(x[:0], bias).shape == (0, 100)
    if activations:  # plain ones are multiplied by gemm.c, some of whose instruction sets round in other ways
        assert all(torch.equal(rows, every_isa[0]) for rows in every_isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("bits", "activations"), KINDS)
def test_nan_and_infinity_stay_in_their_row(bits: int, activations: bool, isa: str) -> None:
    x = torch.randn(9, 64)
    x[3, 5], x[6, 0] = float("nan"), -float("inf")
    y = gemm(torch.randn(40, 64), bits, activations, isa, torch.float32)(x, None)
    assert y[3].isnan().all()
    assert not y[6].isfinite().any()
    assert y[[0, 1, 2, 4, 5, 7, 8]].isfinite().all()


def test_a_gemm_that_is_wrong_on_this_cpu_is_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kernels = kernels_of("generic")
    monkeypatch.setattr(QuantizedGemm, "__call__", lambda _self, x, _bias: x.new_zeros(len(x), 70))
    gemms = GemmSelector(kernels, Quantization(8, logits=False, activations="auto", dtype=torch.float32))
    layer = nn.Linear(96, 70)
    packed = gemms.pack(layer, "model.q_proj")
    assert packed is not None
    x = torch.randn(3, 96)
    assert error(packed(x), oracle(x, layer.weight, 8, activations=True) + layer.bias.double()) < 1e-5
    assert gemms.counts == {"int8 weights and int8 activations by PyTorch": 1}
    assert caplog.messages == [
        "CPU kernels: linear layers with int8 weights and int8 activations in torch.float32 "
        "are wrong on this CPU, and off"
    ]


@pytest.mark.parametrize(("path", "head", "expected"), [("m.gate", False, 0), ("lm_head", True, 0), ("m.up", False, 1)])
def test_routers_and_heads_stay_as_they_are(path: str, head: bool, expected: int) -> None:
    gemms = GemmSelector(kernels_of("generic"), Quantization(8, logits=False, activations="auto", dtype=torch.float32))
    gemms.pack(nn.Linear(32, 32), path, is_head=head)
    assert sum("int8" in name for name in gemms.counts) == expected
