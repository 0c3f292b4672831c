"""What a start does with each option of TGIS and vllm-tgis-adapter, as docs/compatibility.md says, and with the
environments of TGIS's deployments."""

import json
import logging
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import yaml
from config_parsing import read
from repository import REPOSITORY
from tables import table
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from benchmarks.certificates import make_pair
from demo.fake_model import make_fake_model
from tgis.config import parse
from tgis.defaults import LAUNCHER
from tgis.engines import load_engine
from tgis.engines.base import Engine
from tgis.errors import OptionError, StartError
from tgis.ipc.messages import EngineOptions
from tgis.prepare import prepare

SUPPORT = Path(__file__).parent / "support"
LLAMA = {"model_type": "llama", "max_position_embeddings": 4096, "num_key_value_heads": 4, "eos_token_id": 256}
TINY = {  # sizes decide nothing about a start
    **dict.fromkeys(("d_model", "hidden_size", "d_ff", "intermediate_size"), 64),
    **dict.fromkeys(("n_heads", "n_head", "num_heads", "num_attention_heads"), 8),
    **dict.fromkeys(("n_layers", "n_layer", "num_layers", "num_decoder_layers", "num_hidden_layers"), 1),
    "d_kv": 8,
    "vocab_size": 257,
}


def read_options() -> dict[str, dict[str, str]]:
    """Each option with each of its values, by the name that the table has for it."""
    tried: dict[str, dict[str, str]] = {}
    for group in yaml.safe_load((SUPPORT / "tgis_options.yaml").read_text()).values():
        for name, value in group.items():
            several = isinstance(value, list)
            tried |= {f"{name}={one}" if several else name: {name: str(one)} for one in (value if several else [value])}
    return tried


def read_table() -> dict[str, str]:
    """What the docs say of each option."""
    section = (REPOSITORY / "docs/compatibility.md").read_text().split("## Options at the start\n")[1]
    rows = re.findall(r"^\| (`.*?`) \| (.*?) \|$", section, re.MULTILINE)
    return {name: result for names, result in rows for name in re.findall(r"`(.*?)`", names)}


OPTIONS = read_options()
OVERLAYS, STARTS = map(yaml.safe_load((SUPPORT / "tgis_overlays.yaml").read_text()).get, ("overlays", "starts"))
OPTIONS_TABLE = read_table()


def make_model(directory: Path, settings: dict[str, Any]) -> Path:
    """A model whose config.json is `settings`, but for its sizes."""
    make_fake_model(directory)
    settings = settings | {name: size for name, size in TINY.items() if name in settings}
    (directory / "config.json").write_text(json.dumps(settings))
    config = AutoConfig.from_pretrained(directory)
    family = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    family.from_config(config, dtype=torch.float16).save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps(settings))
    return directory


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("llama"), LLAMA | TINY)


@pytest.fixture(scope="module")
def values(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the words in capitals stand for in the list of options."""
    directory = tmp_path_factory.mktemp("files")
    pair = make_pair()
    files = {"CERTIFICATE": pair.cert, "KEY": pair.key, "FILE": b""}
    for name, content in files.items():
        (directory / name).write_bytes(content)
    return {name: str(directory / name) for name in files} | {"MODEL": str(llama), "DIRECTORY": str(directory)}


Engines = dict[bytes, tuple[Engine, list[str]]]
Start = Callable[[dict[str, str]], tuple[str, Engine | None]]


@pytest.fixture(scope="module")
def engines() -> Engines:
    """Loaded ones with their warnings, by their options: most options of a server change nothing for them."""
    return {}


@pytest.fixture
def start(caplog: pytest.LogCaptureFixture, tmp_path_factory: pytest.TempPathFactory, engines: Engines) -> Start:
    """Do what a start does with an environment; says how it went, and gives the engine."""
    here = {"CACHE_DIR": str(tmp_path_factory.getbasetemp() / "cache"), "NUM_THREADS": "1", "CPU_ISA": "none"}

    def warnings() -> list[str]:
        found = [record for record in caplog.records if record.levelno >= logging.WARNING]
        caplog.clear()
        return [record.getMessage() for record in found if record.name.startswith("tgis.")]

    def load(options: EngineOptions) -> tuple[Engine, list[str]]:
        key = msgspec.json.encode(options)
        if key not in engines:
            # measuring the memory would take seconds for each
            engine, _ = load_engine(msgspec.structs.replace(options, estimate_memory="off"), sys.exit, print)
            engines[key] = engine, warnings()
        return engines[key]

    def run(environ: dict[str, str]) -> tuple[str, Engine | None]:
        try:
            preparation = prepare(parse([], here | environ, "tgis serve")).with_safetensors()
            said = warnings()
            engine, others = load(preparation.engine_options())
        except StartError as error:
            return f"refused: {error}", None
        return f"starts with a warning: {'; '.join(said + others)}" if said + others else "starts", engine

    return run


def test_the_tables_have_every_option_and_overlay() -> None:
    assert OPTIONS_TABLE.keys() == OPTIONS.keys()
    assert STARTS.keys() == OVERLAYS.keys()


@pytest.mark.parametrize("label", OPTIONS)
def test_an_option_alone(label: str, values: dict[str, str], start: Start) -> None:
    (option,) = OPTIONS[label].items()
    environ = {"MODEL_NAME": values["MODEL"], option[0]: values.get(option[1], option[1])}
    if option[0].startswith("TLS_"):
        environ |= {"TLS_CERT_PATH": values["CERTIFICATE"], "TLS_KEY_PATH": values["KEY"]}
    result, _ = start(environ)
    assert result.replace(option[0], "…") == OPTIONS_TABLE[label]
    if result != "starts":
        refused = result.replace("starts with a warning", "refused: STRICT_OPTIONS")
        assert start(environ | {"STRICT_OPTIONS": "true"}) == (refused, None)


def make_cached_model(cache: Path, name: str) -> dict[str, str]:
    """The environment of an overlay, with a tiny model in the hub cache."""
    environ = {key: str(value) for key, value in OVERLAYS[name]["env"].items()}
    entry = cache / f"models--{environ['MODEL_NAME'].replace('/', '--')}"
    make_model(entry / "snapshots" / "commit", OVERLAYS[name]["config"])
    (entry / "refs").mkdir()
    (entry / "refs" / "main").write_text("commit")
    return environ | {"TRANSFORMERS_CACHE": str(cache)}


def overlay(name: str) -> Any:
    """Slow where several ranks start."""
    return pytest.param(name, marks=[pytest.mark.slow] if OVERLAYS[name]["env"].get("NUM_GPUS", 1) > 1 else [])


@pytest.mark.parametrize("name", [*map(overlay, OVERLAYS)])
def test_an_overlay(name: str, tmp_path: Path, start: Start) -> None:
    """Found in the hub cache, as in TGIS; the model is a tiny one of the same config.json."""
    result, engine = start(make_cached_model(tmp_path, name))
    if engine is not None:
        engine.warm_up()  # generates tokens
        engine.close()
    assert result == STARTS[name]


# Of its launcher, router and model server, with values that ask for something, by what a start does.
HONOURED = """REVISION=r VALIDATION_WORKERS=3 NUM_SHARD=2 QUANTIZE=awq SPECULATE=3 DTYPE=float16 MAX_BEST_OF=3
    MAX_CONCURRENT_REQUESTS=7 MAX_STOP_SEQUENCES=5 MAX_TOP_N_TOKENS=6 MAX_INPUT_TOKENS=7 MAX_INPUT_LENGTH=8
    MAX_TOTAL_TOKENS=90 MAX_BATCH_PREFILL_TOKENS=80 MAX_WAITING_TOKENS=5 MAX_BATCH_SIZE=9 PORT=80 MASTER_ADDR=a
    MASTER_PORT=7 HUGGINGFACE_HUB_CACHE=/c CUDA_MEMORY_FRACTION=0.5 JSON_OUTPUT=true OTLP_SERVICE_NAME=n
    CORS_ALLOW_ORIGIN=* API_KEY=k DISABLE_GRAMMAR_SUPPORT=true MAX_CLIENT_BATCH_SIZE=5
    LORA_ADAPTERS=a/b PAYLOAD_LIMIT=5000 TOKENIZER_NAME=t GRACEFUL_TERMINATION_TIMEOUT=90 PREFIX_CACHING=0"""
ALWAYS = "ENABLE_PREFILL_LOGPROBS=true MESSAGES_API_ENABLED=true USAGE_STATS=off DISABLE_USAGE_STATS=true"
WARNED = """SHARDED=true KV_CACHE_DTYPE=fp8_e4m3fn TRUST_REMOTE_CODE=true WAITING_SERVED_RATIO=1.2
    MAX_BATCH_TOTAL_TOKENS=9 CUDA_GRAPHS=1,2 SHARD_UDS_PATH=/s
    DISABLE_CUSTOM_KERNELS=true WATERMARK_GAMMA=0.5 WATERMARK_DELTA=2 NGROK=true
    NGROK_AUTHTOKEN=t NGROK_EDGE=e TOKENIZER_CONFIG_PATH=/t USAGE_STATS=on MAX_IMAGE_FETCH_SIZE=9 PROMETHEUS_PORT=9
    ATTENTION=paged FLASH_DECODING=1 FLASH_INFER=1 PREFILL_CHUNKING=0 USE_FLASH_ATTENTION=false MASTER_SHARD_UDS_PATH=/s
    USE_CUSTOM_MODELING=false GPTQ_BITS=4 GPTQ_GROUPSIZE=128 TGI_WIGGLE_ROOM=0.9 LOG_COLORIZE=1"""
REFUSED = "ROPE_SCALING=linear ROPE_FACTOR=2.0 WEIGHTS_CACHE_OVERRIDE=/w QUANTIZE=exl2"


@pytest.mark.parametrize("how", ["HONOURED", "ALWAYS", "WARNED", "REFUSED"])
def test_no_option_of_tgi_is_silent(how: str) -> None:
    for assignment in globals()[how].split():
        name, value = assignment.split("=")
        try:
            config = read(**{name: value})
            got = "WARNED" if config.warnings else "ALWAYS" if config == read() else "HONOURED"
        except OptionError:
            got = "REFUSED"
        assert got == how, assignment
        assert how != "WARNED" or name in config.warnings[0]


def test_lora_adapters_of_tgi_are_lora_modules() -> None:
    expected = {"a/b": "a/b@main", "c": "/d", "e": "f/g@r"}
    assert read(LORA_ADAPTERS="a/b@main, c=/d,e=f/g@r").lora_modules == expected


@table("options", "launcher")
def test_defaults_of_tgis(row: dict[str, Any]) -> None:
    expected = row["expected"]
    config = parse(["--model-name", "m"], dict(word.split("=") for word in row["line"].split()), LAUNCHER)
    assert ({name: getattr(config, name) for name in expected}, config.warnings) == (expected, ())
    assert parse(["--model-name", "m"], {"CUDA_VISIBLE_DEVICES": "0,1"}, "tgis serve") == read()
