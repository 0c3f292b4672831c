"""Which engine is loaded when options ask for one that cannot run the model, and what is said about it."""

import json
import math
import re
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from batches import engine_options
from cpu_kernels import CPU_ISA, kernels_of
from safetensors.torch import load_file, save_file
from tiny_models import make_model, tgis_warnings

from tgis.engines import load_engine
from tgis.engines.base import Engine
from tgis.engines.kernels.kv_codes import kv_dtype_of
from tgis.engines.loading import loader
from tgis.errors import StartError
from tgis.ipc.lookups import AdapterStoreOptions
from tgis.ipc.messages import EngineInfo
from tgis.utils.logs import format_bytes

STORE = AdapterStoreOptions("/store", 1 << 20, 16)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One that tgis_native can run, and one that it cannot."""
    return {name: make_model(name, tmp_path_factory.mktemp(name)) for name in ("Llama", "LongT5", "T5")}


def load(model: Path, **changes: Any) -> Engine:
    return load_engine(engine_options(model, 2, **changes), sys.exit, print)[0]


@pytest.mark.parametrize(
    ("model", "engine", "warning"),
    [
        ("LongT5", "tgis_native", "the engine is hf_transformers, not tgis_native: the cross-attention of LongT5"),
        ("Llama", "hf_optimum_ort", "the engine is hf_transformers, not hf_optimum_ort: {path} has no ONNX graphs"),
    ],
)
def test_a_model_that_the_engine_cannot_run_falls_back(
    models: dict[str, Path], model: str, engine: str, warning: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert load(models[model], engine=engine).info.padded
    said = warning.format(path=models[model])
    (logged,) = tgis_warnings(caplog)
    assert logged.startswith(said)
    with pytest.raises(StartError, match=f"^STRICT_OPTIONS: {said}"):
        load(models[model], engine=engine, strict=True)


@pytest.mark.parametrize(
    ("model", "changes", "refusal"),
    [
        ("Llama", {"engine": "hf_transformers"}, "KV_CACHE_DTYPE=int8 works with tgis_native only, not with hf_trans"),
        ("Llama", {"engine": "hf_optimum_ort"}, "KV_CACHE_DTYPE=int8 works with tgis_native only, not with hf_optimum"),
        (
            "LongT5",
            {"engine": "auto"},
            "KV_.*, not with hf_transformers, not tgis_native: the cross-attention of",
        ),
        ("Llama", {"kv_cache_dtype": "bfloat16"}, "KV_CACHE_DTYPE=bfloat16, but LlamaForCausalLM is in float32$"),
    ],
)
def test_codes_in_the_kv_cache_are_refused_where_they_have_no_effect(
    models: dict[str, Path], model: str, changes: dict[str, Any], refusal: str
) -> None:
    with pytest.raises(StartError, match=f"^{refusal}"):
        load(models[model], **{"kv_cache_dtype": "int8"} | changes)
    with pytest.raises(StartError, match=r"^KV_CACHE_DTYPE=int8 works on CPUs only, not on cuda$"):
        kv_dtype_of("int8", torch.device("cuda"))


def test_one_model_at_a_time_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The attention of XGLM cannot be replaced, which is known once it has been loaded."""
    first: list[weakref.ref[Any]] = []
    load_model = loader.load_model

    def load_first(*args: Any) -> Any:
        loaded = load_model(*args)
        first.append(weakref.ref(loaded))
        return loaded

    def load_second(*args: Any) -> Any:
        assert [model() for model in first] == [None]
        return load_model(*args)

    monkeypatch.setattr("tgis.engines.paged.model_runner.load_model", load_first)
    monkeypatch.setattr("tgis.engines.padded.model.load_model", load_second)
    assert load(make_model("XGLM", tmp_path), engine="auto").info.model_class == "XGLMForCausalLM"
    assert len(first) == 1


@pytest.mark.parametrize(("model", "padded"), [("Llama", False), ("T5", False), ("LongT5", True)])
def test_auto_takes_the_best_that_can_run_the_model(
    models: dict[str, Path], model: str, padded: bool, caplog: pytest.LogCaptureFixture
) -> None:
    assert load(models[model], engine="auto", strict=True).info.padded == padded
    assert not tgis_warnings(caplog)


@pytest.mark.parametrize("engine", ["auto", "hf_transformers"])
def test_only_tgis_native_compiles(models: dict[str, Path], engine: str, caplog: pytest.LogCaptureFixture) -> None:
    load(models["LongT5"], engine=engine, compile=True)
    said = "PT2_COMPILE has no effect: the engine hf_transformers does not compile"
    assert said in caplog.messages
    with pytest.raises(StartError, match=f"^STRICT_OPTIONS: {said}$"):
        load(models["LongT5"], engine=engine, compile=True, strict=True)


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


Change = Callable[[dict[str, Any], dict[str, Any]], object]  # of the weights and of config.json
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128}
INPUT_NORM = "model.layers.1.input_layernorm.weight"
BROKEN: dict[str, tuple[Change, str]] = {  # and what the line says
    "NaN": (lambda weights, _: weights[INPUT_NORM][3:4].fill_(math.nan), f"{INPUT_NORM} has values that are NaN"),
    "infinite": (lambda weights, _: weights["lm_head.weight"][96, -1].fill_(-math.inf), "lm_head.weight has values"),
    "shape": (lambda weights, _: weights.update({INPUT_NORM: torch.ones(3)}), f"{INPUT_NORM} has the shape [3] in"),
    "activation": (lambda _, config: config.update(hidden_act="zork"), "KeyError: 'zork'"),
    "type of a field": (lambda _, config: config.update(vocab_size="x"), "Field 'vocab_size' expected int, got str"),
    "heads": (lambda _, config: config.update(num_attention_heads=0), "ZeroDivisionError"),
    "plain": (lambda _, config: config.update(quantization_config=AWQ), ": no layer is quantized as awq"),
    "quantization": (lambda _, config: config.update(quantization_config={"quant_method": "zork"}), "by 'zork' are"),
    "text of images": (
        lambda _, config: config.update(model_type="llava", text_config={**config}, quantization_config=AWQ),
        ": quantized checkpoints of llava are not supported",
    ),
    "layers": (lambda _, config: config.update(num_hidden_layers=0), ": num_hidden_layers must be at least 1"),
    "not a decoder": (lambda _, config: config.update(model_type="vit"), "Unrecognized configuration class"),
    "no type": (lambda _, config: config.update(model_type=["llama"]), "has no models of type ['llama']"),
    "padding": (lambda _, config: config.update(pad_token_id=9999), "Padding_idx must be within num_embeddings"),
}


@pytest.mark.parametrize(("change", "said"), BROKEN.values(), ids=BROKEN)
def test_what_is_wrong_with_a_model_is_one_line(
    models: dict[str, Path], change: Change, said: str, tmp_path: Path
) -> None:
    write_changed(models["Llama"], change, tmp_path)
    with pytest.raises(StartError, match=re.escape(said)) as caught:
        load(tmp_path, engine="auto")
    assert str(caught.value).startswith(f"{tmp_path}: ")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def write_changed(model: Path, change: Change, to: Path) -> None:
    weights, config = load_file(model / "model.safetensors"), json.loads((model / "config.json").read_text())
    change(weights, config)
    save_file(weights, to / "model.safetensors", {"format": "pt"})
    (to / "config.json").write_text(json.dumps(config))


def test_scores_that_are_not_finite_end_the_warm_up(models: dict[str, Path], tmp_path: Path) -> None:
    write_changed(models["Llama"], lambda weights, _: weights["lm_head.weight"].fill_(3e38), tmp_path)
    with pytest.raises(StartError, match=f"^{tmp_path}: a first step failed: the model's scores are not finite$"):
        load(tmp_path, engine="hf_transformers").warm_up()


@pytest.mark.parametrize(("count", "named"), [(3, "x.0, x.1, x.2"), (9, "x.0, x.1, x.2, ...")])
def test_weights_without_a_place_in_the_model_are_a_warning(
    models: dict[str, Path], count: int, named: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    more = {f"x.{number}": torch.zeros(1) for number in range(count)}
    more |= {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}  # which old files have
    write_changed(models["Llama"], lambda weights, _: weights.update(more), tmp_path)
    load(tmp_path)
    said = f"{tmp_path}: {count} weights in the files have no place in LlamaForCausalLM: {named}"
    assert tgis_warnings(caplog) == [said]


ENCODER_DECODER = {"encoder_decoder": True, "max_positions": 256, "decoder_start_token_id": 3}
# 80 % of two rows with 256 tokens; paged in blocks, of which the two parts of an encoder-decoder need one more
PADDED = {"invariant": False, "padded": True, "token_capacity": 409, "max_positions": 256}
PAGED = {
    "invariant": True,
    "padded": False,
    "token_capacity": 400,
    "max_request_tokens": 400,
    "block_size": 16,
    "kv_cache_bytes": 204_800,
}
TWO_PARTS = {"token_capacity": 432, "max_request_tokens": 26 * 16 + 1, "kv_cache_bytes": 432 * 1024}


NO_LOOKUP = "SPECULATION=lookup has no effect: it needs tgis_native on a CPU, and attention in all layers"
CACHE = "KV cache: {} blocks of 16 tokens, {} KiB a token, 0.00 GiB in all"


@pytest.mark.parametrize(
    ("model", "engine", "values", "last"),
    [
        ("Llama", "tgis_native", PAGED | {"proposed_tokens": 5}, CACHE.format(25, 0.5)),
        ("T5", "tgis_native", PAGED | ENCODER_DECODER | TWO_PARTS | {"proposed_tokens": 5}, CACHE.format(27, "1.0")),
        ("Llama", "hf_transformers", PADDED, NO_LOOKUP),
        ("T5", "hf_transformers", PADDED | ENCODER_DECODER, NO_LOOKUP),
    ],
)
def test_what_an_engine_is_and_what_its_start_logs(
    models: dict[str, Path], model: str, engine: str, values: dict[str, Any], last: str, caplog: Any, monkeypatch: Any
) -> None:
    if engine == "tgis_native":
        kernels_of(CPU_ISA)  # or the test is skipped
    monkeypatch.setattr(loader, "watched", progress := mock.MagicMock())
    caplog.set_level("INFO", "tgis")
    changes = {"estimate_memory": "manual", "speculation": "lookup", "speculation_max_tokens": 5}
    loaded = load(models[model], engine=engine, **changes)
    loaded.warm_up()
    name = {"Llama": "LlamaForCausalLM", "T5": "T5ForConditionalGeneration"}[model]
    sizes = {"vocab_size": 97, "input_vocab_size": 97, "embedding_size": 32, "max_batch_size": 2}
    common: dict[str, Any] = {"dtype": "float32", "max_prefill_tokens": 512, "encoder_decoder": False, **sizes}
    of_model = {"arithmetic": loaded.info.arithmetic, "lora_targets": loaded.info.lora_targets}
    assert loaded.info == EngineInfo(engine, name, "cpu", **common | of_model | values)
    weights = {"Llama": "84.9 KiB", "T5": "159 KiB"}[model]
    said = [f"loading {models[model]} as float32 on cpu", f"  {weights} of weights", f"loaded {name} in S s", last]
    logged = [re.sub(r"\d+\.\d s$", "S s", message) for message in caplog.messages]
    assert [message for message in logged if not re.match("CPU kernels|steps with prompts", message)] == said
    assert [name for name, *_ in progress.mock_calls] == ["", "().__enter__", "().__exit__"]
    label, measure, total, unit = progress.call_args.args
    assert (label, format_bytes(total), unit) == ("loading weights", weights, "B")
    assert 0 <= measure() < 1 << 28


@pytest.mark.parametrize("name", ["GPT2", "BioGpt"])
def test_a_table_of_positions_limits_the_sequence_length(name: str, tmp_path: Path) -> None:
    """A position beyond it fails a step on a CPU and ends the process on a GPU."""
    model = make_model(name, tmp_path)
    for engine in ("auto", "hf_transformers"):
        assert load(model, engine=engine, max_sequence_length=128).info.max_positions == 128
        with pytest.raises(StartError, match=rf"^MAX_SEQUENCE_LENGTH 129 exceeds the 128 positions of {name}"):
            load(model, engine=engine, max_sequence_length=129)


def test_an_engine_without_adapters_says_so(models: dict[str, Path], caplog: pytest.LogCaptureFixture) -> None:
    load(models["Llama"], engine="fake", adapter_store=STORE)
    (said,) = caplog.messages
    assert said.startswith("PREFIX_STORE_PATH has no effect: ")
    with pytest.raises(StartError, match=f"^STRICT_OPTIONS: {said}$"):
        load(models["Llama"], engine="fake", adapter_store=STORE, strict=True)
    caplog.clear()
    assert load(models["T5"], engine="hf_transformers", adapter_store=STORE).info.supports_adapters
    assert not tgis_warnings(caplog)
