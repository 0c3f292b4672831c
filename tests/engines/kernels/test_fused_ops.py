"""Fused operators against transformers' own in float64, for every instruction set; only what agrees is replaced."""

import copy
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from cpu_kernels import of_best_isa, of_each_isa, seeded
from tiny_models import make_config
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.models.bloom.modeling_bloom import BloomGelu
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.gptj import modeling_gptj
from transformers.models.helium import modeling_helium
from transformers.models.llama import modeling_llama
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P
from transformers.models.olmo.modeling_olmo import OlmoLayerNorm
from transformers.models.olmo2 import modeling_olmo2
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.t5 import modeling_t5
from transformers.models.t5.modeling_t5 import T5DenseGatedActDense
from transformers.models.umt5.modeling_umt5 import UMT5DenseGatedActDense

from tgis.engines.kernels.cpu.activations import ACTIVATIONS, Activation, GatedMlp, InvariantFunctions
from tgis.engines.kernels.cpu.fused_ops import fuse
from tgis.engines.kernels.cpu.library import CpuKernels
from tgis.engines.kernels.cpu.norms import Norm, NormFormula
from tgis.engines.kernels.cpu.rotary import RotaryEmbedding, computes_rotary

ERROR = {torch.float32: 2e-6, torch.bfloat16: 8e-3}
LAYER_NORM = NormFormula(1e-6, centered=True)
NORMS: list[Any] = [
    *[
        (kind, NormFormula(1e-6))
        for kind in (
            modeling_llama.LlamaRMSNorm,
            modeling_qwen3.Qwen3RMSNorm,
            modeling_olmo2.Olmo2RMSNorm,
            modeling_gpt_oss.GptOssRMSNorm,
            modeling_t5.T5LayerNorm,
        )
    ],
    (modeling_gemma2.Gemma2RMSNorm, NormFormula(1e-6, offset=1.0)),
    *[(kind, LAYER_NORM) for kind in (nn.LayerNorm, partial(nn.LayerNorm, bias=False), CohereLayerNorm)],
    (partial(nn.LayerNorm, elementwise_affine=False), LAYER_NORM),
    (NemotronLayerNorm1P, NormFormula(1e-6, offset=1.0, centered=True)),
    (lambda size, _: OlmoLayerNorm(size), NormFormula(1e-5, centered=True)),
]
GATED_MLPS = [
    *(modeling_llama.LlamaMLP, modeling_qwen3.Qwen3MLP, modeling_olmo2.Olmo2MLP),
    *(lambda config, kind=kind: kind(t5_config(config)) for kind in (T5DenseGatedActDense, UMT5DenseGatedActDense)),
]
HALVES = [modeling_llama, modeling_qwen3, modeling_olmo2, modeling_gpt_neox]  # rotate one half with the other
OTHERS = [modeling_helium, modeling_gptj]  # rotate neighbours


deterministic, kernels, best_kernels = seeded, of_each_isa, of_best_isa


class Holder(PreTrainedModel):  # type: ignore[misc]
    """A model of one module."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__(modeling_llama.LlamaConfig())
        self.part = part
        self.other = nn.Linear(2, 2)


class Sharp(nn.Module):  # type: ignore[misc]
    """Looks like an RMS norm and is none: it takes the root of eps."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(32))
        self.eps = 1e-3

    def forward(self, x: Tensor) -> Tensor:
        """Normalize in another way."""
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps**0.5)


def mlp_config(activation: str) -> modeling_llama.LlamaConfig:
    return modeling_llama.LlamaConfig(hidden_size=32, intermediate_size=70, hidden_act=activation)


def t5_config(config: modeling_llama.LlamaConfig) -> modeling_t5.T5Config:
    kind = {"feed_forward_proj": f"gated-{config.hidden_act}", "dropout_rate": 0.0}
    return modeling_t5.T5Config(d_model=config.hidden_size, d_ff=config.intermediate_size, **kind)


def error(expected: Tensor, found: Tensor) -> float:
    return float((expected - found.double()).abs().max() / expected.abs().max().clamp(min=1e-9))


def drawn(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The module with weights that say something."""
    for parameter in module.parameters():
        parameter.copy_(torch.randn_like(parameter))
    return module.to(dtype)


def test_gates_do_not_depend_on_other_rows(kernels: CpuKernels) -> None:
    """As PyTorch's do: what its vectors leave over has other bits."""
    x = torch.randn(33, 20)
    for function in (torch.exp, Tensor.sigmoid, torch.sigmoid, nn.functional.silu, nn.functional.softplus):
        with InvariantFunctions(kernels):
            rows, whole = [function(x[row]) for row in range(len(x))], function(x)
        assert torch.equal(torch.stack(rows), whole)
        torch.testing.assert_close(whole, function(x))


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize(("make", "formula"), NORMS)
def test_norms_of_transformers_are_replaced(
    kernels: CpuKernels, make: Callable[[int, float], nn.Module], formula: NormFormula, dtype: torch.dtype
) -> None:
    for size in (1, 17, 576):
        norm = drawn(make(size, 1e-6), dtype)
        model = Holder(norm).to(dtype)
        assert fuse(model, kernels) == 1
        assert isinstance(model.part, Norm)
        x = torch.randn(2, 40, size).to(dtype) * torch.logspace(-4, 4, 40)[:, None].to(dtype)
        parameters = (getattr(norm, name, None) for name in ("weight", "bias"))
        expected = formula(x.double(), *(None if each is None else each.double() for each in parameters))
        assert error(expected, model.part(x)) < ERROR[dtype]
        assert torch.equal(model.part(x)[:, 7:8], model.part(x[:, 7:8]))
        assert torch.equal(model.part(x.transpose(0, 1)), model.part(x).transpose(0, 1))
        heads = torch.cat([x, x], -1).unflatten(1, (5, 8))[None, ..., size:]  # of a wider product
        assert torch.equal(model.part(heads), model.part(x).unflatten(1, (5, 8))[None])
        assert torch.equal(model.part(heads.transpose(1, 2))[0, :, 0], model.part(x)[0].unflatten(0, (5, 8)))
        assert torch.equal(model.part(x[0].T.contiguous().T), model.part(x[0]))
        x[0, 7, 0] = torch.nan  # it stays in its row
        assert (model.part(x)[0].isnan() == (torch.arange(40) == 7)[:, None]).all()


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize(
    "part",
    [
        *(nn.RMSNorm(32), Sharp(), nn.Linear(32, 32), nn.BatchNorm1d(32), nn.GroupNorm(1, 32), nn.Dropout(), nn.Mish()),
        *(modeling_llama.LlamaMLP(mlp_config(activation)) for activation in ("quick_gelu", "mish")),
    ],
    ids=lambda part: type(part).__name__,
)
def test_other_modules_stay(best_kernels: CpuKernels, part: nn.Module, dtype: torch.dtype) -> None:
    model = Holder(drawn(part, torch.float32)).to(dtype).eval()
    assert fuse(model, best_kernels) == 0
    assert model.part is part


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize(
    ("kind", "activation"),
    [*zip(GATED_MLPS, ("silu", "gelu_pytorch_tanh", "gelu", "relu", "relu2"), strict=True)],
    ids=("silu", "gelu_tanh", "gelu", "relu", "relu2"),
)
def test_gated_mlps_of_transformers_are_replaced(
    kernels: CpuKernels, kind: type[nn.Module], activation: str, dtype: torch.dtype
) -> None:
    mlp = kind(mlp_config(activation)).to(dtype)
    model = Holder(mlp).to(dtype)
    assert fuse(model, kernels) == 1
    assert isinstance(model.part, GatedMlp)
    x = torch.randn(2, 500, 32).to(dtype) * torch.logspace(-2, 2, 500)[:, None].to(dtype)
    wide = copy.deepcopy(mlp).double()
    found = model.part(x)
    for row in range(0, 500, 50):  # whose numbers are of one size
        assert error(wide(x[:, row : row + 50].double()), found[:, row : row + 50]) < 3 * ERROR[dtype]


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize(
    ("part", "name"),
    [
        *[(ACT2FN[name], "gelu_tanh") for name in ("gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_accurate")],
        (BloomGelu(), "gelu_tanh"),
        *[(each, "gelu") for each in (ACT2FN["gelu"], ACT2FN["gelu_python"], nn.GELU())],
        *[(ACT2FN[name], name) for name in ("silu", "relu", "relu2")],
        (nn.ReLU(inplace=True), "relu"),
        (nn.Tanh(), "tanh"),
        (nn.Softplus(), "softplus"),
    ],
)
def test_activations_of_transformers_are_replaced(
    kernels: CpuKernels, part: nn.Module, name: str, dtype: torch.dtype
) -> None:
    model = Holder(part).to(dtype).eval()
    assert fuse(model, kernels) == 1
    assert isinstance(model.part, Activation)
    wide = torch.randn(3, 40, 140).to(dtype) * torch.logspace(-3, 2, 40)[:, None].to(dtype)
    x = wide[..., 70:]  # of a wider product
    expected, found = ACTIVATIONS[name](x.double()), model.part(x)
    for row in range(40):  # whose numbers are of one size
        assert error(expected[:, row], found[:, row]) < ERROR[dtype]
    assert torch.equal(model.part(x.transpose(0, 2)), found.transpose(0, 2))
    assert model.part(torch.tensor([torch.nan], dtype=dtype)).isnan().all()


@pytest.mark.parametrize("name", ["exp", "softplus"])
def test_exponentials_are_the_same_wherever_an_element_stands(kernels: CpuKernels, name: str) -> None:
    x = torch.cat([torch.linspace(-87, 88, 999), torch.tensor([-torch.inf, 89, 500, torch.inf])])
    function = Activation(nn.Identity(), name, kernels)
    torch.testing.assert_close(function(x), ACTIVATIONS[name](x.double()).float(), rtol=1e-6, atol=0)
    assert torch.equal(torch.cat([function(part) for part in x.split(7)]), function(x))


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize(("batch", "angles", "size"), [(1, 1, 2), (3, 3, 6), (3, 1, 64)])
def test_rotates_as_transformers_does(
    kernels: CpuKernels, dtype: torch.dtype, batch: int, angles: int, size: int
) -> None:
    states = torch.randn(batch, 70, 6, 2 * size).to(dtype)[..., :size].transpose(1, 2)  # of a partly rotated head
    q, k = states[:, :4], states[:, 4:]
    cos, sin = torch.randn(2, angles, 70, size).to(dtype)
    rotate = RotaryEmbedding(modeling_llama.apply_rotary_pos_emb, kernels)
    wide = modeling_llama.apply_rotary_pos_emb(q.double(), k.double(), cos.double(), sin.double())
    for expected, found in zip(wide, rotate(q, k, cos, sin), strict=True):
        assert error(expected, found) < ERROR[dtype]
    heads_last = rotate(q.transpose(1, 2), k.transpose(1, 2), cos, sin, unsqueeze_dim=2)
    for expected, found in zip(wide, heads_last, strict=True):
        assert error(expected, found.transpose(1, 2)) < ERROR[dtype]
    exact = rotate(q.transpose(1, 2), k.transpose(1, 2), cos.double(), sin.double(), unsqueeze_dim=2)
    assert torch.allclose(exact[0].transpose(1, 2), wide[0])  # as the model's own function


def test_what_a_head_has_beyond_the_rotary_size_is_copied(kernels: CpuKernels) -> None:
    q, k = torch.randn(2, 1, 4, 7, 24)
    cos, sin = torch.randn(2, 1, 7, 8)
    plain = modeling_gpt_neox.apply_rotary_pos_emb
    for whole, found in zip(plain(q, k, cos, sin), RotaryEmbedding(plain, kernels)(q, k, cos, sin), strict=True):
        assert torch.allclose(whole, found, atol=1e-5)


@pytest.mark.parametrize("module", HALVES + OTHERS)
def test_a_function_that_rotates_halves_is_known(module: ModuleType) -> None:
    assert computes_rotary(module.apply_rotary_pos_emb) == (module in HALVES)


@pytest.mark.parametrize("name", ["Gemma2", "Gemma3Text", "T5Gemma"])
def test_logits_are_capped_where_the_models_code_does(best_kernels: CpuKernels, name: str) -> None:
    config = make_config(name)
    text = config.get_text_config(decoder=True)
    text.final_logit_softcapping = None
    family = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model = family.from_config(config).eval()
    others = fuse(copy.deepcopy(model), best_kernels)
    ids = torch.randint(3, 60, (2, 9))
    inputs = {"input_ids": ids} | ({"decoder_input_ids": ids} if config.is_encoder_decoder else {})
    text.final_logit_softcapping = cap = float(model(**inputs).logits.abs().max()) / 3
    expected = model(**inputs).logits
    assert fuse(model, best_kernels) == others + 1
    assert text.final_logit_softcapping is None
    assert torch.allclose(model(**inputs).logits, expected, atol=1e-5 * cap)


def test_logits_that_are_made_in_another_way_stay(best_kernels: CpuKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    model = AutoModelForCausalLM.from_config(make_config("Gemma2")).eval()
    plain = type(model).forward

    def forward(module: nn.Module, **inputs: Any) -> Any:
        output = plain(module, **inputs)
        output.logits = output.logits * 2
        return output

    monkeypatch.setattr(type(model), "forward", forward)
    expected = model(input_ids=torch.ones(1, 3).long()).logits
    fuse(model, best_kernels)
    assert model.config.final_logit_softcapping == 30
    assert torch.allclose(model(input_ids=torch.ones(1, 3).long()).logits, expected, atol=1e-5)


def test_a_norm_of_another_dtype_is_the_models_own(best_kernels: CpuKernels) -> None:
    plain, x = drawn(modeling_llama.LlamaRMSNorm(64), torch.bfloat16), torch.randn(3, 64)
    assert torch.equal(Norm(plain, NormFormula(1e-6), best_kernels)(x), plain(x))


# without parameters, like an activation, but for other inputs: an IndexError, a TypeError, and RuntimeErrors
RAISING = [nn.Flatten(9), nn.CosineSimilarity(), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(2), nn.PixelShuffle(2)]


@pytest.mark.parametrize("part", [*RAISING, nn.Fold(2, 2)])
def test_a_module_that_raises_anything_stays_and_is_named(
    best_kernels: CpuKernels, part: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    """It is not tried if no pass calls modules of its class."""
    caplog.set_level("DEBUG", "tgis")
    assert fuse(Holder(nn.Sequential(part, nn.SiLU())), best_kernels, {nn.Sequential, nn.SiLU}) == 1
    assert not caplog.text
    assert fuse(Holder(nn.Sequential(part, nn.SiLU())), best_kernels) == 1
    assert f"part.0, {type(part).__name__}, is not fused" in caplog.text


def test_without_kernels_nothing_is_replaced() -> None:
    assert fuse(Holder(modeling_llama.LlamaRMSNorm(32)), None) == 0
