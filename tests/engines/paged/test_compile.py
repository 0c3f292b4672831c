"""PT2_COMPILE: which steps are compiled, and when; test_models_gpu.py compares them with transformers."""

import logging
import random
import re
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from batches import engine_options, limits
from tiny_models import (
    check_greedy,
    generate_all,
    greedy_requests,
    make_config,
    make_model,
    make_model_from_config,
    tgis_warnings,
)
from transformers import AutoModelForCausalLM

from tgis.engines.memory import capacity
from tgis.engines.paged import model_runner
from tgis.engines.paged.engine import PagedEngine
from tgis.engines.paged.model_runner import ModelRunner
from tgis.errors import StartError
from tgis.ipc.lookups import AdapterStoreOptions
from tgis.ipc.messages import EngineOptions


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("Llama", tmp_path_factory.mktemp("compiled"))


def options(model: Path, **changes: Any) -> EngineOptions:
    values: dict[str, Any] = {"engine": "tgis_native", "compile": True, "dtype": "float64"}  # it has no CPU kernels
    return engine_options(model, **values | changes)


def graphs() -> int:
    """How many were ever compiled in this process."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def assert_generates_what_transformers_does(engine: PagedEngine, model: Path, count: int = 1) -> None:
    bounds = limits(60, padded=False, block_size=16, max_batch_size=4, prefill_tokens=7)
    requests = greedy_requests(count, 6, random.Random(count))
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64).eval()
    for request, tokens in zip(requests, generate_all(engine, bounds, requests, random.Random(1)), strict=True):
        check_greedy(reference, request.tokens, tokens)


@pytest.mark.slow  # it traces 12 graphs
@pytest.mark.timeout(900)
def test_three_kinds_of_layers_have_graphs_with_and_without_adapters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    model = make_model_from_config(make_config("Gemma3Text", num_hidden_layers=3), tmp_path)
    store = AdapterStoreOptions("/nowhere", 1 << 30, 100)
    engine = PagedEngine(options(model, adapter_store=store))
    for index, layer in enumerate(engine.runner.model.model.layers):
        layer.self_attn.sliding_window = 8 * (index + 1)
    before = graphs()
    engine.warm_up()
    assert graphs() - before == 3 * 2 * 2  # of one token or several, with adapters or without


def failing(error: Exception) -> mock.Mock:
    """A compiler whose code fails."""
    return mock.Mock(return_value=mock.Mock(side_effect=error))


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        (failing(RuntimeError("no compiler\nand many lines more")), "no compiler"),
        (
            lambda call, **_: lambda *states, **others: 1.1 * call(*states, **others),
            "compiled steps do not give the logits of eager ones (off by ",
        ),
    ],
)
def test_without_a_compiler_that_works_steps_run_eagerly(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, compiler: Any, reason: str
) -> None:
    monkeypatch.setattr(torch, "compile", compiler)
    engine = PagedEngine(options(model))
    assert_generates_what_transformers_does(engine, model)
    assert f"PT2_COMPILE has no effect: {reason}" in caplog.text
    assert engine.runner.compiled is None
    with pytest.raises(StartError, match=f"^STRICT_OPTIONS: PT2_COMPILE has no effect: {re.escape(reason)}"):
        PagedEngine(options(model, strict=True)).warm_up()


def test_a_device_out_of_memory_is_no_reason_to_run_eagerly(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", failing(torch.OutOfMemoryError("CUDA out of memory")))
    with pytest.raises(StartError, match="raise BATCH_SAFETY_MARGIN"):
        PagedEngine(options(model)).warm_up()


@pytest.mark.parametrize(
    ("wanted", "device", "expected"),
    [
        (None, "cpu", []),
        (None, "cuda", ["compile", "capture"]),
        (False, "cuda", ["capture"]),
        (True, "cpu", ["compile"]),
    ],
)
def test_gpus_compile_by_default(
    wanted: bool | None, device: str, expected: list[str], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []
    monkeypatch.setattr(model_runner, "cuda_capture", lambda: None)
    monkeypatch.setattr(capacity, "rank_memory", lambda *_: 1 << 30)
    monkeypatch.setattr(ModelRunner, "_compile", lambda *_: called.append("compile"))
    monkeypatch.setattr(ModelRunner, "capture_graphs", lambda *_: called.append("capture"))
    engine = PagedEngine(options(model, compile=wanted, kv_cache_bytes=1 << 20))
    engine.runner.device = torch.device(device)
    engine.warm_up()
    assert called == expected


def test_nothing_is_compiled_where_cpu_kernels_run(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    engine = PagedEngine(options(model, dtype="float32"))
    before = graphs()
    assert_generates_what_transformers_does(engine, model)
    what = "PT2_COMPILE has no effect: CPU kernels have replaced the model's operators already"
    assert [text for text in tgis_warnings(caplog) if "PT2" in text] == [what]
    assert graphs() == before
