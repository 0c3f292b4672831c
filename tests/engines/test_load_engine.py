"""Which engine is loaded when options ask for one that cannot run the model, and what is said about it."""

import json
import logging
import sys
import weakref
from pathlib import Path
from typing import Any

import msgspec
import pytest
from batches import engine_options
from safetensors.torch import load_file, save_file
from tiny_models import make_model

from tgis.engines import load_engine
from tgis.engines.base import Engine
from tgis.engines.loading import loader
from tgis.errors import StartError
from tgis.ipc.lookups import AdapterStoreOptions

STORE = AdapterStoreOptions("/store", 1 << 20, 16)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One that tgis_native can run, and one that it cannot."""
    return {name: make_model(name, tmp_path_factory.mktemp(name)) for name in ("Llama", "T5")}


def load(model: Path, **changes: Any) -> Engine:
    return load_engine(msgspec.structs.replace(engine_options(model, 2, threads=1), **changes), sys.exit, print)[0]


@pytest.mark.parametrize(
    ("model", "engine", "warning"),
    [
        ("T5", "tgis_native", "the engine is hf_transformers, not tgis_native: {path} is an encoder-decoder"),
        ("Llama", "hf_optimum_ort", "the engine is hf_transformers, not hf_optimum_ort: {path} has no ONNX graphs"),
    ],
)
def test_a_model_that_the_engine_cannot_run_falls_back(
    models: dict[str, Path], model: str, engine: str, warning: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert load(models[model], engine=engine).info.padded
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    said = warning.format(path=models[model])
    assert record.getMessage().startswith(said)
    with pytest.raises(StartError, match=f"^STRICT_OPTIONS: {said}"):
        load(models[model], engine=engine, strict=True)


def test_one_model_at_a_time_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The attention of MPT cannot be replaced, which is known once it has been loaded."""
    first: list[weakref.ref[Any]] = []
    load_model = loader.load_causal_lm

    def load_first(*args: Any) -> Any:
        loaded = load_model(*args)
        first.append(weakref.ref(loaded[0]))
        return loaded

    def load_second(*args: Any) -> Any:
        assert [model() for model in first] == [None]
        return load_model(*args)

    monkeypatch.setattr("tgis.engines.paged.engine.load_causal_lm", load_first)
    monkeypatch.setattr("tgis.engines.padded.causal_lm.load_causal_lm", load_second)
    assert load(make_model("Mpt", tmp_path), engine="auto").info.model_class == "MptForCausalLM"
    assert len(first) == 1


@pytest.mark.parametrize(("model", "padded"), [("Llama", False), ("T5", True)])
def test_auto_takes_the_best_that_can_run_the_model(
    models: dict[str, Path], model: str, padded: bool, caplog: pytest.LogCaptureFixture
) -> None:
    assert load(models[model], engine="auto", strict=True).info.padded == padded
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("engine", ["auto", "hf_transformers"])
def test_only_tgis_native_compiles(models: dict[str, Path], engine: str, caplog: pytest.LogCaptureFixture) -> None:
    load(models["T5"], engine=engine, compile=True)
    said = "PT2_COMPILE has no effect: the engine hf_transformers does not compile"
    assert said in caplog.messages
    with pytest.raises(StartError, match=f"^STRICT_OPTIONS: {said}$"):
        load(models["T5"], engine=engine, compile=True, strict=True)


@pytest.mark.parametrize("auto_map", [{}, {"auto_map": {"AutoConfig": "configuration_baichuan.BaichuanConfig"}}])
def test_a_model_that_only_its_own_code_can_run_is_refused(tmp_path: Path, auto_map: dict[str, Any]) -> None:
    (tmp_path / "configuration_baichuan.py").write_text("raise AssertionError('must not run')")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "baichuan", **auto_map}))
    said = r"transformers [\d.]+ has no models of type 'baichuan', and the code of a model is never run"
    with pytest.raises(StartError, match=said):
        load(tmp_path, engine="auto")


@pytest.mark.parametrize("engine", ["auto", "hf_transformers"])
def test_a_missing_weight_is_named(engine: str, tmp_path: Path) -> None:
    """Else transformers makes up random numbers."""
    file = make_model("Llama", tmp_path) / "model.safetensors"
    weights = load_file(file)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(StartError, match=r"1 weights of LlamaForCausalLM are missing, model.layers.1.mlp.up_proj"):
        load(tmp_path, engine=engine)


@pytest.mark.parametrize("name", ["GPT2", "OPT", "CodeGen", "BioGpt"])
def test_a_table_of_positions_limits_the_sequence_length(name: str, tmp_path: Path) -> None:
    """A position beyond it fails a step on a CPU and ends the process on a GPU."""
    model = make_model(name, tmp_path)
    for engine in ("auto", "hf_transformers"):
        assert load(model, engine=engine, max_sequence_length=128).info.max_positions == 128
        with pytest.raises(StartError, match=rf"^MAX_SEQUENCE_LENGTH 129 exceeds the 128 positions of {name}"):
            load(model, engine=engine, max_sequence_length=129)


@pytest.mark.parametrize("engine", ["auto", "hf_transformers"])
def test_computed_positions_do_not(models: dict[str, Path], engine: str) -> None:
    load(models["Llama"], engine=engine, max_sequence_length=129)


def test_shards_are_not_compiled(models: dict[str, Path]) -> None:
    with pytest.raises(StartError, match="STRICT_OPTIONS: PT2_COMPILE has no effect with NUM_SHARD above 1"):
        load(models["Llama"], num_shards=2, compile=True, strict=True)


def test_an_engine_without_adapters_says_so(models: dict[str, Path], caplog: pytest.LogCaptureFixture) -> None:
    load(models["Llama"], engine="fake", adapter_store=STORE)
    (said,) = caplog.messages
    assert said.startswith("PREFIX_STORE_PATH has no effect: ")
    with pytest.raises(StartError, match=f"^STRICT_OPTIONS: {said}$"):
        load(models["Llama"], engine="fake", adapter_store=STORE, strict=True)
    caplog.clear()
    assert load(models["T5"], engine="hf_transformers", adapter_store=STORE).info.supports_adapters
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
