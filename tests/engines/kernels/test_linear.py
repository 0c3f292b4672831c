"""Packed linear layers against float64, for every instruction set; no row depends on those beside it. Of several GEMMs
the fastest that is right is used.
"""

from dataclasses import dataclass
from functools import partial
from itertools import product

import pytest
import torch
from cpu_kernels import kernels_of, kernels_with_amx, num_threads, of_each_isa, seeded
from tiny_models import make_config
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from tgis.engines.kernels.cpu import linear
from tgis.engines.kernels.cpu.build import isa_flags
from tgis.engines.kernels.cpu.gemm import CpuGemm, Gemm, MakeGemm, OneDnnGemm, our_gemms, smallest
from tgis.engines.kernels.cpu.library import CpuKernels
from tgis.engines.kernels.cpu.linear import GemmSelector, PackedLinear, pack_linears

SIZES = [(2, 1), (64, 32), (576, 192), (575, 49), (1538, 70), (4100, 33)]  # beyond a tile, beyond what is prefetched
ERROR = {torch.float32: 1e-5, torch.bfloat16: 8e-3}
ISAS = [*isa_flags()]  # each has a library
HALVES = (torch.bfloat16, torch.float16)
ONEDNN_DTYPES = [torch.float32, *([torch.bfloat16] if torch.ops.mkldnn._is_mkldnn_bf16_supported() else [])]


@dataclass(frozen=True)
class Ours:
    """One of our GEMMs."""

    kernels: CpuKernels
    name: str
    dtype: torch.dtype
    inputs_multiple: int = 2

    def make(self, weight: Tensor) -> Gemm:
        return our_gemms(weight, self.kernels, weight.dtype)[self.name](weight)


deterministic, kernels = seeded, of_each_isa


@pytest.fixture(params=[*((isa, dtype) for isa in ISAS for dtype in ERROR), ("amx", torch.bfloat16)])
def ours(request: pytest.FixtureRequest) -> Ours:
    isa, dtype = request.param
    return Ours(kernels_with_amx(), isa, dtype, 32) if isa == "amx" else Ours(kernels_of(isa), isa, dtype)


def tensors(inputs: int, outputs: int, dtype: torch.dtype, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    weight = torch.randn(outputs, inputs).div(inputs**0.5).to(dtype)
    return weight, torch.randn(outputs).to(dtype), torch.randn(rows, inputs).to(dtype)


def error(gemm: Gemm, weight: Tensor, bias: Tensor | None, x: Tensor) -> float:
    expected = nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    return float((gemm(x, bias).double() - expected).abs().max() / expected.abs().max())


def check_errors(make: MakeGemm, dtype: torch.dtype, inputs: int, outputs: int) -> None:
    for rows in (1, 2, 7, 65, 200):
        weight, bias, x = tensors(inputs, outputs, dtype, rows)
        gemm = make(weight)
        assert error(gemm, weight, None, x) < ERROR[dtype]
        assert error(gemm, weight, bias, x) < ERROR[dtype]


@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
def test_our_gemm_multiplies(ours: Ours, inputs: int, outputs: int) -> None:
    check_errors(ours.make, ours.dtype, inputs + -inputs % ours.inputs_multiple, outputs)


@pytest.mark.parametrize("dtype", ONEDNN_DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
def test_onednn_multiplies(dtype: torch.dtype, inputs: int, outputs: int) -> None:
    check_errors(OneDnnGemm, dtype, inputs, outputs)


def test_no_row_depends_on_others(ours: Ours) -> None:
    weight, bias, x = tensors(288, 100, ours.dtype, 70)
    gemm = ours.make(weight)
    alone = torch.cat([gemm(row[None], bias) for row in x])
    for threads, rows in ((1, 9), (1, 70), (2, 2), (2, 64), (5, 70)):
        with num_threads(threads):
            assert torch.equal(gemm(x[:rows], bias), alone[:rows])


@pytest.mark.parametrize("dtype", ERROR)
def test_instruction_sets_with_fused_multiply_add_give_the_same_bits(dtype: torch.dtype) -> None:
    weight, bias, x = tensors(576, 70, dtype, 20)
    expected = Ours(kernels_of("avx2"), "avx2", dtype).make(weight)(x, bias)
    for isa in ("avx512", "avx512_vnni", "avx512_bf16"):
        assert torch.equal(Ours(kernels_of(isa), isa, dtype).make(weight)(x, bias), expected)


def test_nan_and_infinity_stay_in_their_row(ours: Ours) -> None:
    weight, bias, x = tensors(64, 40, ours.dtype, 9)
    x[3, 5], x[6, 0] = float("nan"), float("inf")
    y = ours.make(weight)(x, bias)
    assert y[3].isnan().all()
    assert not y[6].isfinite().any()
    assert y[[0, 1, 2, 4, 5, 7, 8]].isfinite().all()


def test_inputs_of_any_shape_and_strides(ours: Ours) -> None:
    weight, bias, x = tensors(64, 40, ours.dtype, 12)
    gemm = ours.make(weight)
    assert torch.equal(gemm(x.view(2, 3, 2, 64), bias), gemm(x, bias).view(2, 3, 2, 40))
    assert torch.equal(gemm(x.T.contiguous().T, bias), gemm(x, bias))
    assert gemm(x[:0], bias).shape == (0, 40)


def test_a_weight_in_16_bits_gives_the_bits_of_the_same_in_float32(kernels: CpuKernels) -> None:
    for dtype, (inputs, outputs) in product(HALVES, SIZES):
        weight, bias, x = tensors(inputs, outputs, torch.float32, 70)
        weight = weight.to(dtype)
        weight[0, :2] = torch.tensor([2.0**-24, -65504.0])  # a denormal of float16, and its largest number
        saved, widened = (CpuGemm(w, kernels, torch.float32) for w in (weight, weight.float()))
        for rows in (1, 7, 70):
            assert torch.equal(saved(x[:rows], bias), widened(x[:rows], bias))


def test_the_smallest_dtype_that_holds_a_weight() -> None:
    weight = torch.randn(70, 64)
    assert smallest(weight, torch.float32).dtype == torch.float32
    for dtype in HALVES:
        held = smallest(weight.to(dtype).float(), torch.float32)
        assert held.dtype == dtype
        assert torch.equal(held, weight.to(dtype))
    tiny = 1e-9 * weight.bfloat16()  # beyond float16
    assert smallest(tiny.float(), torch.float32).dtype == torch.bfloat16
    assert smallest(weight, torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("isa", ISAS)
def test_weights_that_our_gemm_can_multiply_by(isa: str) -> None:
    kernels = kernels_of(isa)
    for dtype in (torch.float16, torch.float32, torch.float64, torch.bfloat16):
        assert [*our_gemms(torch.zeros(32, 64, dtype=dtype), kernels, dtype)] == [isa] * (dtype in ERROR)
    assert not our_gemms(torch.zeros(32, 64), None, torch.float32)


def test_amx_multiplies_by_some() -> None:
    kernels = kernels_with_amx()
    for dtype, inputs, expected in (
        (torch.bfloat16, 64, {"avx512_bf16", "amx"}),
        (torch.bfloat16, 48, {"avx512_bf16"}),
        (torch.float32, 64, {"avx512_bf16"}),
    ):
        assert our_gemms(torch.zeros(32, inputs, dtype=dtype), kernels, dtype).keys() == expected


def llama(dtype: torch.dtype) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(make_config("Llama")).to(dtype).eval().requires_grad_(requires_grad=False)


def check_packed(kernels: CpuKernels | None, dtype: torch.dtype, layers: int) -> None:
    model, ids = llama(dtype), torch.tensor([[5, 9, 13]])
    expected = model(ids).logits
    gemms = GemmSelector(kernels)
    pack_linears(model, gemms)
    packed = gemms.counts
    assert packed.total() == layers == sum(type(m) is PackedLinear for m in model.modules())
    assert set(packed) <= {"onednn" if kernels is None else kernels.isa}
    assert (model(ids).logits - expected).norm() < 10 * ERROR.get(dtype, 0) * expected.norm() + 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_linear_layers_are_packed_for_what_can_multiply_them(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = sum(type(module) is nn.Linear for module in llama(dtype).modules())
    check_packed(None, dtype, layers if dtype in ONEDNN_DTYPES else 0)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)  # as on CPUs with AVX2 alone
    check_packed(None, dtype, layers if dtype == torch.float32 else 0)
    kernels = kernels_of("avx512_bf16")
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    check_packed(kernels, dtype, layers if dtype in ERROR else 0)


def test_a_gemm_that_is_wrong_on_this_cpu_is_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kernels = kernels_of("generic")

    def wrong(weight: Tensor) -> Gemm:
        return CpuGemm(weight * 1.1, kernels, weight.dtype)

    def depends_on_others(weight: Tensor) -> Gemm:
        gemm = CpuGemm(weight, kernels, weight.dtype)
        return lambda x, bias: gemm(x, bias) * (1 + 1e-6 * len(x))

    right = partial(CpuGemm, kernels=kernels, dtype=torch.float32)
    makers = {"right": right, "dependent": depends_on_others, "wrong": wrong}  # the last one is preferred
    monkeypatch.setattr(linear, "our_gemms", lambda _weight, _kernels, _dtype: makers)
    selector = GemmSelector(kernels)
    for _ in range(2):
        selector.gemm(torch.randn(32, 64), torch.float32)
    assert selector.counts == {"right": 2}
    assert [record.getMessage() for record in caplog.records] == [
        f"CPU kernels: linear layers by {name} in torch.float32 are wrong on this CPU, and off"
        for name in ("wrong", "dependent")
    ]
