"""Mixtures of experts against transformers in float64; the same bits for a token alone, in any batch."""

import copy
from typing import Any

import pytest
import torch
from cpu_kernels import kernels_here, num_threads, seeded
from tiny_models import make_config, tgis_warnings
from torch import Tensor, nn
from transformers import NemotronHConfig
from transformers.integrations.moe import batched_mm_experts_forward
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Config, DeepseekV4Experts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from tgis.engines.kernels.cpu.experts import PackedExperts, matrix_of, pack_experts
from tgis.engines.kernels.cpu.library import CpuKernels
from tgis.engines.kernels.cpu.linear import GemmSelector
from tgis.engines.quantization.config import Quantization
from tgis.engines.quantization.weight import quantize

deterministic = seeded
EXPERTS, HIDDEN, SIZE = 6, 96, 40
MODULES = {
    "plain": (Qwen3MoeExperts, make_config("Qwen3Moe")),
    "transposed, interleaved, biases, limits": (GptOssExperts, make_config("GptOss")),
    "limits": (DeepseekV4Experts, DeepseekV4Config()),
    "no gate": (NemotronHExperts, NemotronHConfig()),
}
KINDS: dict[str, tuple[Quantization | None, float]] = {  # and the relative error
    "plain": (None, 0.0),
    "int8": (Quantization(8, logits=False, activations="none", dtype=torch.float32), 0.0),
    "int4": (Quantization(4, logits=False, activations="none", dtype=torch.float32), 0.0),
    "int8, rounded": (Quantization(8, logits=False, activations="auto", dtype=torch.float32), 0.03),
    "int4, rounded": (Quantization(4, logits=False, activations="auto", dtype=torch.float32), 0.03),
}


def experts_of(name: str) -> Any:
    kind, config = MODULES[name]
    with torch.device("meta"):
        experts = kind(config)
    for path, weight in [*experts.named_parameters()]:
        outputs = HIDDEN if path.startswith("down") else SIZE * (2 if "gate" in path else 1)
        inputs = SIZE if path.startswith("down") else HIDDEN
        shape = (outputs,) if weight.ndim == 2 else (inputs, outputs) if experts.is_transposed else (outputs, inputs)
        numbers = torch.randn(EXPERTS, *shape) / 4
        setattr(experts, path, nn.Parameter(numbers.bfloat16().float(), requires_grad=False))  # as models are saved
    experts.num_experts = EXPERTS
    return experts


def packed(experts: Any, how: Quantization | None, kernels: CpuKernels, dtype: torch.dtype) -> Any:
    """The module in the place of `experts`, which stays if it cannot be packed."""
    read = lambda path, name, rows: matrix_of(experts, getattr(experts, name))[rows]  # noqa: E731
    block = nn.Sequential(experts, nn.LayerNorm((4, 4)))
    pack_experts(block, GemmSelector(kernels, how), kernels, dtype, read)
    assert isinstance(block[1].weight, nn.Parameter)  # which is no router
    return block[0]


def expected(experts: Any, how: Quantization | None, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    exact = copy.deepcopy(experts)
    for weight in exact.parameters():
        if how and how.bits and weight.ndim == 3:
            rows = weight.mT if experts.is_transposed else weight
            rows = torch.stack([quantize(expert, how.bits).dequantized() for expert in rows])
            weight.data = rows.mT if experts.is_transposed else rows
    return batched_mm_experts_forward(exact.double(), x.double(), ids, weights.double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODULES)
def test_experts_are_those_of_transformers_and_no_token_depends_on_others(
    name: str, kind: str, dtype: torch.dtype
) -> None:
    how, error = KINDS[kind]
    how = how and Quantization(how.bits, how.logits, how.activations, dtype)
    experts = experts_of(name)
    x = torch.randn(300, HIDDEN).to(dtype)
    ids = torch.rand(300, EXPERTS).topk(3).indices
    ids[200:] = ids[200]  # more rows than a thread takes at a time
    weights = torch.rand(300, 3)
    reference = expected(experts, how, x, ids, weights)
    tolerance = error or (1e-5 if dtype == torch.float32 else 0.01)
    for kernels in kernels_here():
        module = packed(copy.deepcopy(experts).to(torch.float32 if how else dtype), how, kernels, dtype)
        assert isinstance(module, PackedExperts)
        output = module(x, ids, weights)
        assert (output.double() - reference).norm() < tolerance * reference.norm(), kernels.isa
        with num_threads(3):
            for first, last in ((0, 1), (7, 8), (5, 11), (190, 300), (299, 300)):
                part = slice(first, last)
                assert torch.equal(module(x[part], ids[part], weights[part]), output[part])
        assert module(x[:0], ids[:0], weights[:0]).shape == (0, HIDDEN)


def test_other_formulas_are_left_to_transformers(caplog: pytest.LogCaptureFixture) -> None:
    experts = experts_of("plain")
    experts.act_fn = nn.Mish()
    assert packed(experts, None, kernels_here()[-1], torch.float32) is experts
    what = "no kernel computes Qwen3MoeExperts of these sizes in torch.float32"
    assert tgis_warnings(caplog) == [f"experts of 1 layers are not packed: {what}"]
