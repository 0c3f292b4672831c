"""Quantized linear layers against their definition in float64; the same bits for a row whatever is beside it and under
every instruction set.
"""

from itertools import product

import pytest
import torch
from cpu_kernels import kernels_here, kernels_of, kernels_with_amx, num_threads, seeded
from quantized_cases import GROUPS, KINDS, Kind
from quantized_formats import e4m3_value
from torch import Tensor, nn
from torch.nn.functional import pad

from tgis.engines.kernels.cpu.gemm import Gemm
from tgis.engines.kernels.cpu.linear import GemmSelector
from tgis.engines.kernels.cpu.quantized import PlainGemm, QuantizedGemm
from tgis.engines.kernels.cpu.recording import Recorder
from tgis.engines.quantization.config import Quantization
from tgis.engines.quantization.weight import E2M1, E4M3, INT4, INT8, ActivationCodes, QuantizedWeight, quantize

CPU_KINDS = KINDS | {"mxfp4": Kind(E2M1, 32, dtype=torch.bfloat16)}
SIZES = [(2, 1), (33, 5), (96, 70), (577, 33), (420, 5)]
deterministic = seeded
ERROR = {torch.float32: 1e-5, torch.bfloat16: 8e-3}


def value_of(table: Tensor, code: int) -> float:
    if table is E2M1:
        return (-1.0 if code > 7 else 1.0) * (0, 0.5, 1, 1.5, 2, 3, 4, 6)[code % 8]
    assert table is INT4 or table is INT8 or table is E4M3
    return e4m3_value(code) if table is E4M3 else code - 128 * (table is INT8)


def numbers_of(weight: QuantizedWeight) -> Tensor:
    """What a weight stands for, by the definition of its codes."""
    outputs, inputs = weight.codes.shape
    groups = torch.arange(inputs) // (weight.group_size or inputs)
    values = torch.tensor([value_of(weight.table, code) for code in range(len(weight.table))], dtype=torch.float64)
    offsets = torch.zeros_like(weight.scale) if weight.offset is None else weight.offset
    stored = values[weight.codes.long()] * weight.scale.double()[:, groups] + offsets.double()[:, groups]
    found = torch.empty(outputs, inputs, dtype=torch.float64)
    found[:, slice(None) if weight.order is None else weight.order] = stored
    return found


def groups_of(x: Tensor) -> Tensor:
    """Groups of 32 numbers of each row, the last filled up with zeros: [rows, groups, 32]"""
    return pad(x, (0, -x.shape[1] % 32)).unflatten(1, (-1, 32))


def oracle_weight(weight: Tensor, bits: int) -> Tensor:
    """What the codes of a weight that is quantized by rounding stand for."""
    if bits == 8:
        scale = weight.abs().amax(1, keepdim=True) / 127
        scale[scale == 0] = 1
        return ((weight / scale).round() * scale).double()
    groups = groups_of(weight)
    low, high = (ends.bfloat16().float() for ends in groups.aminmax(dim=2, keepdim=True))
    step = ((high - low) / 15).bfloat16().float()
    step[step == 0] = 1
    values = ((groups - low) / step).round().clamp(0, 15).double() * step.double() + low.double()
    return values.flatten(1)[:, : weight.shape[1]]


def oracle_activations(x: Tensor, how: ActivationCodes | None) -> Tensor:
    if how is None:
        return x.double()
    groups = groups_of(x.double())
    largest = groups.abs().amax((2,) if how.per_block else (1, 2), keepdim=True)
    scale = torch.tensor(how.scale).double() if how.scale else largest / how.steps
    codes = groups / scale if how.scale else (groups * how.steps / largest).nan_to_num()
    return (codes.round().clamp(-128, 127) * scale).flatten(1)[:, : x.shape[1]]


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("bits", [4, 8])
def test_rounding_gives_the_codes_of_the_definition(bits: int) -> None:
    for inputs, outputs in SIZES:
        weight = torch.randn(outputs, inputs)
        weight[1:2] = 0
        assert error(quantize(weight, bits).dequantized(), oracle_weight(weight, bits)) < 1e-6


def every_gemm(selectors: list[GemmSelector], weight: QuantizedWeight, dtype: torch.dtype) -> list[Gemm]:
    return [PlainGemm(weight), *(selector.quantized_gemm(weight, dtype) for selector in selectors)]


@pytest.mark.parametrize("name", CPU_KINDS)
def test_layers_are_their_definition(name: str) -> None:
    kind = CPU_KINDS[name]
    gemms = [GemmSelector(kernels) for kernels in kernels_here()]
    for inputs, outputs in SIZES:
        weight, x = kind.weight(outputs, inputs), torch.randint(-250, 251, (11, inputs)) / 32  # exact in bfloat16
        x[:, ::32] = -251 / 32  # a prime: no number is halfway between two codes
        x[1] = 0
        order = torch.arange(inputs) if weight.order is None else weight.order
        product = oracle_activations(x[:, order], kind.activations) @ numbers_of(weight)[:, order].T
        for dtype, tolerance in ERROR.items():
            bias = torch.randn(outputs).to(dtype)
            for gemm in every_gemm(gemms, weight, dtype):
                assert error(gemm(x.to(dtype), bias), product + bias.double()) < tolerance
                assert error(gemm(x.to(dtype), None), product) < tolerance
    for kernels, selector in zip(kernels_here(), gemms, strict=True):
        assert all(found.endswith(f" by {kernels.isa}") for found in selector.counts)


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize("name", KINDS)
def test_no_row_depends_on_others_or_on_the_instruction_set(name: str, dtype: torch.dtype) -> None:
    weight, bias = KINDS[name].weight(100, 330), torch.randn(100).to(dtype)
    x = (torch.randn(70, 330) * torch.logspace(-30, 30, 70)[:, None]).to(dtype)
    every_isa = []
    for kernels in kernels_here():
        layer = GemmSelector(kernels).quantized_gemm(weight, dtype)
        rows = torch.cat([layer(row[None], bias) for row in x])
        every_isa.append(rows)
        for threads, count in ((1, 2), (1, 33), (2, 9), (5, 70)):
            with num_threads(threads):
                assert torch.equal(layer(x[:count], bias), rows[:count])
        assert torch.equal(layer(x.view(7, 10, 330), bias).view(70, 100), rows)
        assert layer(x[:0], bias).shape == (0, 100)
    if weight.activations:  # plain ones are multiplied by gemm.c, some of whose instruction sets round in other ways
        assert all(torch.equal(rows, every_isa[0]) for rows in every_isa)


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.table is INT8 and kind.activations])
@pytest.mark.parametrize(("inputs", "outputs"), [(330, 100), (384, 33)])
def test_amx_gives_the_bits_of_vnni(inputs: int, outputs: int, name: str, dtype: torch.dtype) -> None:
    weight, x, bias = KINDS[name].weight(outputs, inputs), torch.randn(70, inputs), torch.randn(outputs).to(dtype)
    selectors = GemmSelector(kernels_of("avx512_vnni")), GemmSelector(kernels_with_amx())
    vnni, amx = (selector.quantized_gemm(weight, dtype) for selector in selectors)
    assert [*selectors[1].counts] == ["int8 weights and int8 activations by amx"]
    for rows, threads in product((15, 16, 33, 70), (1, 3)):
        with num_threads(threads):
            for added in (None, bias):
                assert torch.equal(amx(x[:rows].to(dtype), added), vnni(x[:rows].to(dtype), added))


@pytest.mark.parametrize("name", KINDS)
def test_nan_and_infinity_stay_in_their_row(name: str) -> None:
    x, how = torch.randn(9, 64), KINDS[name].activations
    x[3, 5], x[6, 0] = float("nan"), -float("inf")
    for kernels in kernels_here():
        y = GemmSelector(kernels).quantized_gemm(KINDS[name].weight(40, 64), torch.float32)(x, None)
        assert y[3].isnan().all()
        assert y[6].isfinite().any() == (how is not None and how.scale is not None)  # the largest code there is
        assert y[[0, 1, 2, 4, 5, 7, 8]].isfinite().all()


@pytest.mark.parametrize("name", KINDS)
def test_products_are_recorded_without_operators_of_pytorch(name: str) -> None:
    kernels, x = kernels_of("generic"), torch.randn(3, 96)
    layer = GemmSelector(kernels).quantized_gemm(KINDS[name].weight(40, 96), torch.float32)
    with torch.inference_mode():
        replay, output = Recorder(kernels).record(lambda: layer(x, None))
        x.copy_(torch.randn(3, 96))
        replay.kernel_calls()
        assert torch.equal(output, layer(x, None))


def test_codes_without_a_kernel_are_multiplied_by_pytorch() -> None:
    weight = Kind(INT4, 8).weight(5, 40)
    expected = numbers_of(weight)
    gemms = GemmSelector(kernels_of("generic"))
    gemm, _ = (gemms.quantized_gemm(weight, torch.float32) for _ in range(2))
    assert error(gemm(torch.eye(40), None).T, expected) < 1e-6
    assert gemms.counts == {"int4 weights and plain activations by PyTorch": 2}


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
    expected = oracle_activations(x, GROUPS) @ oracle_weight(layer.weight, 8).T + layer.bias.double()
    assert error(packed(x), expected) < 1e-5
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
