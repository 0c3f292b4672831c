"""The check at load, in half precision: rounding is no reason to refuse a model, a difference in one layer is."""

from pathlib import Path
from typing import Any

import pytest
import torch
from batches import engine_options
from cpu_kernels import CPU_ISA
from slow_cases import slow_except
from tiny_models import make_model, make_model_from_config, paged_engine, tgis_warnings
from torch import Tensor, nn
from transformers import LlamaConfig

from tgis.engines.paged.attention import PagedAttention
from tgis.engines.paged.batch import BatchBuilder, FlatBatch
from tgis.engines.paged.engine import PagedEngine
from tgis.errors import Unsupported
from tgis.ipc.messages import EngineOptions

LAYERS = 48


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> EngineOptions:
    """A model so deep that rounding changes its logits: by 15 % with CPU kernels in bfloat16."""
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = make_model_from_config(config, tmp_path_factory.mktemp("deep"))
    return engine_options(model, 4, dtype="bfloat16")


def test_a_deep_model_is_paged(options: EngineOptions) -> None:
    PagedEngine(options)


def test_attention_that_differs_in_one_layer_is_not(options: EngineOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    attend = PagedAttention.__call__

    def scaled(
        self: PagedAttention, module: nn.Module, query: Tensor, *others: Tensor, **arguments: Any
    ) -> tuple[Tensor, None]:
        factor = 1.2 if module.layer_idx == LAYERS - 1 else 1.0
        return attend(self, module, factor * query, *others, **arguments)

    monkeypatch.setattr(PagedAttention, "__call__", scaled)
    with pytest.raises(Unsupported, match=f"own attention in layer {LAYERS - 1} "):
        PagedEngine(options)


def test_other_positions_are_not(options: EngineOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    build = BatchBuilder._build

    def without_positions(*arguments: object) -> FlatBatch:
        batch = build(*arguments)  # type: ignore[arg-type]
        batch.positions = torch.zeros_like(batch.positions)
        return batch

    monkeypatch.setattr(BatchBuilder, "_build", without_positions)
    with pytest.raises(Unsupported, match="own logits"):
        PagedEngine(options)


@pytest.mark.parametrize("name", slow_except(["Gemma2", "M2M100", "OPT"], ["Llama", "Gemma2", "M2M100", "OPT"]))
def test_pytorch_computes_with_the_codes_of_the_kernel(name: str, tmp_path: Path, caplog: Any) -> None:
    """Which are not compiled."""
    model = make_model(name, tmp_path)
    logits = []
    for isa, kv_cache_dtype in ((CPU_ISA, "int8"), ("none", "int8"), ("none", "auto")):
        compiles = kv_cache_dtype == "int8"
        engine = paged_engine(model, cpu_isa=isa, kv_cache_dtype=kv_cache_dtype, compile=compiles)
        logits.append(engine.runner.dummy_logits(tokens=range(1, 90), output=range(30, 60)))
    by_kernel, by_pytorch, plain = logits
    assert (by_kernel - by_pytorch).norm() < 1e-3 * plain.norm()
    assert 1e-4 * plain.norm() < (by_pytorch - plain).norm() < 0.2 * plain.norm()
    what = "encoder-decoders are" if engine.runner.encoder else "KV_CACHE_DTYPE=int8 is"
    assert tgis_warnings(caplog).count(f"PT2_COMPILE has no effect: {what} not compiled") == 2


def test_a_cache_that_changes_the_logits_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tgis.engines.paged.attention.channel_scales", lambda key: key[:, 0].float() * torch.nan)
    options = engine_options(make_model("Llama", tmp_path), 4, kv_cache_dtype="int8")
    with pytest.raises(Unsupported, match=r"^KV_CACHE_DTYPE=int8 steps do not give the logits of eager ones"):
        PagedEngine(options)
