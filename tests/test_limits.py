"""tgis.limits: what options mean for calls, requests, the engine and the adapter store."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from config_parsing import read
from repository import REPOSITORY
from tables import table

from tgis import limits
from tgis.errors import OptionError, StartError
from tgis.frontend.validation import RequestLimits
from tgis.ipc.lookups import AdapterStoreOptions
from tgis.ipc.messages import EngineOptions
from tgis.limits import admission, engine_options, placeholder_id, request_limits
from tgis.models.files import ModelFiles


def test_quotas() -> None:
    options = {"MAX_CONCURRENT_REQUESTS": "8", "MAX_CONCURRENT_REQUESTS_PER_CLIENT": "2", "MAX_CALL_MEMORY_MB": "2"}
    made = admission(read(**options))
    quotas = made.calls, made.inputs, made.message_bytes
    assert [(quota.limit, quota.per_client) for quota in quotas] == [(136, 130), (8, 2), (2 << 20, 1 << 20)]
    assert admission(read(MAX_CONCURRENT_REQUESTS="8")).inputs.per_client == 8


@table("options", "documented limits")
def test_limits_are_as_documented(row: dict[str, Any]) -> None:
    value = getattr(importlib.import_module(row["module"]), row["name"]) // row["unit"]
    assert row["text"].format(value) in (REPOSITORY / "docs" / row["file"]).read_text()


def test_clients_without_credentials_are_known_by_address_if_wanted() -> None:
    for by_address in (False, True):
        limits = admission(read(LIMIT_BY_ADDRESS=str(by_address)))
        assert limits.client(b"proven", "1.2.3.4") == b"proven"
        assert limits.client(b"", "1.2.3.4") == (b"1.2.3.4" if by_address else b"")


def model(tmp_path: Any, length: int = 200) -> ModelFiles:
    return ModelFiles(tmp_path, {"max_position_embeddings": length}, {})


@table("options", "limits")
def test_options_become_limits_of_requests(row: dict[str, Any], tmp_path: Any, caplog: Any) -> None:
    given = dict(word.split("=") for word in row["line"].split())
    limits = request_limits(read(**given), model(tmp_path))
    assert {name: getattr(limits, name) for name in row["expected"]} == row["expected"]
    assert caplog.messages == row.get("warned", [])


def test_inputs_must_be_shorter_than_sequences(tmp_path: Any) -> None:
    with pytest.raises(OptionError, match="MAX_INPUT_TOKENS=200 must be below MAX_SEQUENCE_LENGTH, 200"):
        request_limits(read(MAX_INPUT_TOKENS="200"), model(tmp_path))


def made(tmp_path: Any, **options: str) -> EngineOptions:
    config = read(CACHE_DIR="/c", **options)
    limits = request_limits(config, model(tmp_path))
    return engine_options(config, limits, model(tmp_path), (2,), (3,), AdapterStoreOptions("/a", 1, 2))


def test_options_reach_the_engine(tmp_path: Any) -> None:
    options = {"KV_CACHE_SIZE_MB": "3", "NUM_SHARD": "4", "MAX_BATCH_SIZE": "7", "QUANTIZE": "int8"}
    options |= {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "a", "CLUSTER_SECRET_PATH": "/s"}
    options |= {"MAX_BATCH_PREFILL_TOKENS": "99", "CUDA_PROCESS_MEMORY_FRACTION": "0.5", "PT2_COMPILE": "true"}
    expected: dict[str, Any] = {"kv_cache_bytes": 3 << 20, "num_shards": 4, "max_batch_size": 7, "quantize": "int8"}
    expected |= {"max_prefill_tokens": 99, "cuda_memory_fraction": 0.5, "compile": True, "strict": True, "rank": 2}
    expected |= {"model_path": str(tmp_path), "eos_ids": (2,), "config_eos_ids": (3,), "max_sequence_length": 200}
    expected |= {
        "cluster_secret_path": "/s",
        "dtype": "bfloat16",
        "adapter_store": AdapterStoreOptions("/a", 1, 2),
        "cache_dir": "/c",
    }
    engine = made(tmp_path, DTYPE="bfloat16", STRICT_OPTIONS="true", **options)
    assert {name: getattr(engine, name) for name in expected} == expected
    assert (made(tmp_path, DTYPE="auto").dtype, made(tmp_path).strict) == (None, False)


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"model_type": "eagle"}, "eagle"),
        ({"architectures": ["LlamaEagle3"]}, "Eagle"),
        ({"medusa_heads": 2}, "medusa"),
        ({"model_type": "deepseek_mtp"}, "mtp"),
    ],
)
def test_only_a_model_can_draft(config: dict[str, Any], kind: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert made(tmp_path, SPECULATOR_NAME=str(tmp_path)).speculator_path == str(tmp_path)
    assert made(tmp_path, SPECULATOR_NAME=str(tmp_path), SPECULATION="off").speculator_path is None
    with pytest.raises(StartError, match=r"^SPECULATOR_NAME: model 'org/none' not found: .* no revision 'v2' of it"):
        made(tmp_path, SPECULATOR_NAME="org/none", SPECULATOR_REVISION="v2", HF_HUB_CACHE=str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(StartError, match=f"^SPECULATOR_NAME: {tmp_path} has {kind} heads, which are not supported"):
        made(tmp_path, SPECULATOR_NAME=str(tmp_path))


def test_the_token_of_soft_prompts_is_the_padding_else_an_end() -> None:
    cases = {(3, (2,)): 3, (0, (2,)): 0, (10, (2,)): 2, (-1, (10, 0)): 0, (None, (10,)): 0, (None, (11, 9)): 9}
    models = {case: ModelFiles(Path(), {"pad_token_id": case[0]}, {}) for case in cases}
    assert {case: placeholder_id(model, case[1], 10) for case, model in models.items()} == cases


def options(store: Path | None, length: int, **environ: str) -> AdapterStoreOptions | None:
    """What the engine process gets, for sequences of up to `length` tokens."""
    path = {"PREFIX_STORE_PATH": str(store)} if store else {}
    parsed = read(**path, **environ)
    return limits.adapter_store_options(parsed, RequestLimits(length, 1, include_stop_sequence=True))


def test_soft_prompts_take_up_to_half_of_a_sequence_by_default(tmp_path: Path) -> None:
    assert options(None, 101, MAX_PROMPT_PREFIX_LENGTH="200") is None
    assert options(tmp_path, 101) == AdapterStoreOptions(str(tmp_path), 512 << 20, 51)
    assert options(tmp_path, 101, MAX_PROMPT_PREFIX_LENGTH="100", PROMPT_CACHE_SIZE_MB="3") == AdapterStoreOptions(
        str(tmp_path), 3 << 20, 100
    )
    with pytest.raises(OptionError, match="MAX_PROMPT_PREFIX_LENGTH=101 must be at most 100"):
        options(tmp_path, 101, MAX_PROMPT_PREFIX_LENGTH="101")


def test_lora_modules_are_directories_or_in_the_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = "0123456789" * 4
    refs, cached = (tmp_path / "models--org--sql" / name for name in ("refs", f"snapshots/{commit}"))
    refs.mkdir(parents=True)
    (refs / "main").write_text(commit)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for directory in (cached, tmp_path / "here@v1"):
        directory.mkdir(parents=True)
        (directory / "adapter_config.json").write_text("{}")
    store = options(None, 101, LORA_MODULES="a=here@v1 b=org/sql c=~/here@v1", HF_HUB_CACHE=str(tmp_path))
    modules = {"a": str(tmp_path / "here@v1"), "b": str(cached), "c": str(tmp_path / "here@v1")}
    assert store == AdapterStoreOptions(None, 512 << 20, 51, modules)
    store = options(None, 101, LORA_ADAPTERS="org/sql@main", HF_HUB_CACHE=str(tmp_path))
    assert store == AdapterStoreOptions(None, 512 << 20, 51, {"org/sql": str(cached)})
    with pytest.raises(StartError, match=r"LORA_MODULES: org/sql: .* no revision 'v2' of it in the cache"):
        options(None, 101, LORA_ADAPTERS="org/sql@v2", HF_HUB_CACHE=str(tmp_path))
    with pytest.raises(StartError, match=r"LORA_MODULES: a: .* has no adapter_config\.json"):
        options(None, 101, LORA_MODULES=f"a={tmp_path}")
    with pytest.raises(StartError, match="LORA_MODULES: a: model 'org/none' not found"):
        options(None, 101, LORA_MODULES="a=org/none", HF_HUB_CACHE=str(tmp_path))
