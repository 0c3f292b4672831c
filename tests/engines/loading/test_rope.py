"""Rotary embeddings that depend on the longest sequence of a pass must not change its neighbours."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from cpu_kernels import CPU_ISA, kernels_of
from tiny_models import LLAMA_LIKE, MORE_ARCHITECTURES, TOKEN_IDS, make_model_from_config, paged_engine
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tgis.batcher.sequence import Sequence, StepPlan
from tgis.engines.loading.rope import tabulate_angles
from tgis.engines.paged.engine import PagedEngine
from tgis.engines.paged.recorded_steps import RecordedSteps
from tgis.ipc.request import LogprobOptions, Request, SamplingParams

SMALL = LLAMA_LIKE | TOKEN_IDS | {"max_position_embeddings": 256}
NATURAL = 64  # tokens that the model was first made for


def longrope(short: float, long: float) -> dict[str, Any]:
    factors = {"short_factor": [short] * 4, "long_factor": [long] * 4}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": NATURAL}
    return {
        "max_position_embeddings": 256,
        "original_max_position_embeddings": NATURAL,
        "rope_parameters": rope | factors,
    }


DYNAMIC = {
    "max_position_embeddings": NATURAL,
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
}


DEFAULT = {"rope_type": "default", "rope_theta": 1e4}
MIXED = DYNAMIC | {
    "rope_parameters": {"full_attention": DYNAMIC["rope_parameters"], "sliding_attention": DEFAULT},
    "layer_types": ["sliding_attention", "full_attention"],
    "head_dim": 8,
}


def make(directory: Path, kind: str, **values: Any) -> Path:
    return make_model_from_config(AutoConfig.for_model(kind, **SMALL | values), directory)


def load(model: Path, longest: int) -> PagedEngine:
    return paged_engine(model, 8, kv_cache_bytes=1 << 22, max_sequence_length=longest)


def row(number: int, length: int, first_block: int) -> Sequence:
    tokens = [(7 * place + number) % 90 + 3 for place in range(length)]
    made = Sequence(Request(number, tokens, 2, False, SamplingParams(), LogprobOptions()), 0.0)
    made.block_table = list(range(first_block, first_block + -(-length // 16)))
    return made


def last_logits(engine: PagedEngine, *rows: Sequence) -> torch.Tensor:
    """[rows, V]"""
    plan = StepPlan([*rows], [len(r.tokens) for r in rows], [*rows], has_prefill=True)
    logits, _ = engine.runner.compute_logits(plan)
    return logits.clone()


def assert_logits_of(model: Path, engine: PagedEngine) -> None:
    """The engine gives a prompt the logits of a model in transformers."""
    seq = row(1, 20, 0)
    with torch.inference_mode():
        expected = AutoModelForCausalLM.from_pretrained(model)(torch.tensor([seq.tokens])).logits[0, -1:]
    torch.testing.assert_close(last_logits(engine, seq), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("kind", "values"), [("phi3", longrope(1.0, 8.0)), ("llama", DYNAMIC), ("gemma3_text", MIXED)])
def test_a_long_neighbour_changes_nothing(tmp_path: Path, kind: str, values: dict[str, Any]) -> None:
    engine = load(make(tmp_path, kind, **values), longest=256)
    assert engine.info.arithmetic.endswith(" 256")
    short, long = row(1, 20, 0), row(2, 100, 4)
    alone = last_logits(engine, short)
    torch.testing.assert_close(last_logits(engine, short, long)[:1], alone, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(last_logits(engine, short), alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("longest", "factor"), [(256, 8.0), (NATURAL, 1.0)])
def test_all_sequences_have_the_frequencies_of_the_longest_one_served(
    tmp_path: Path, longest: int, factor: float
) -> None:
    engine = load(make(tmp_path / "both", "phi3", **longrope(1.0, 8.0)), longest)
    assert_logits_of(make(tmp_path / "one", "phi3", **longrope(factor, factor)), engine)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tables_have_what_the_model_computes(dtype: torch.dtype) -> None:
    config = AutoConfig.for_model("llama", **SMALL)
    model, plain = AutoModelForCausalLM.from_config(config, dtype=dtype), LlamaRotaryEmbedding(config)
    tabulate_angles(model, 200)
    assert "forward" in vars(model.model.rotary_emb)
    positions = torch.randint(200, (2, 30))
    x = torch.zeros(2, 30, 32, dtype=dtype)
    for found, expected in zip(model.model.rotary_emb(x, positions), plain(x, positions), strict=True):
        assert found.dtype == dtype
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


LATENT_HEADS = {"qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32}


@pytest.mark.parametrize(("name", "sizes"), [("Llama4Text", {"head_dim": 16}), ("DeepseekV2", LATENT_HEADS)])
def test_angles_as_one_complex_tensor_are_computed(tmp_path: Path, name: str, sizes: dict[str, int]) -> None:
    """With heads for which there are kernels."""
    kernels_of(CPU_ISA)
    config = getattr(transformers, f"{name}Config")(**TOKEN_IDS | MORE_ARCHITECTURES[name] | sizes)
    engine = load(make_model_from_config(config, tmp_path), longest=128)
    assert isinstance(engine.runner.graphs, RecordedSteps)
    assert_logits_of(tmp_path, engine)


def test_angles_of_several_kinds_of_layers_are_computed() -> None:
    config = AutoConfig.for_model("gemma3_text", **SMALL, head_dim=16)
    tabulate_angles(model := AutoModelForCausalLM.from_config(config), 200)
    assert "forward" not in vars(model.model.rotary_emb)
