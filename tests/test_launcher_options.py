"""The options of TGI 3: none is silent. The defaults of text-generation-launcher are TGIS's."""

import pytest
from config_parsing import read

from tgis.config import parse
from tgis.defaults import LAUNCHER
from tgis.errors import OptionError

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


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", {"http_api": False, "shutdown_grace_seconds": 86400, "num_shard": 1}),
        ("HTTP_API=true SHUTDOWN_GRACE_SECONDS=5", {"http_api": True, "shutdown_grace_seconds": 5}),
        ("CUDA_VISIBLE_DEVICES=0,1,2 NVIDIA_VISIBLE_DEVICES=all", {"num_shard": 3}),
        ("NVIDIA_VISIBLE_DEVICES=GPU-1,GPU-2", {"num_shard": 2}),
        ("NVIDIA_VISIBLE_DEVICES=all", {"num_shard": 1}),
        ("CUDA_VISIBLE_DEVICES= NVIDIA_VISIBLE_DEVICES=0,1", {"num_shard": 1}),
        ("CUDA_VISIBLE_DEVICES=0,1 NUM_GPUS=1", {"num_shard": 1}),
    ],
)
def test_defaults_of_tgis(line: str, expected: dict[str, object]) -> None:
    config = parse(["--model-name", "m"], dict(word.split("=") for word in line.split()), LAUNCHER)
    assert ({name: getattr(config, name) for name in expected}, config.warnings) == (expected, ())
    assert parse(["--model-name", "m"], {"CUDA_VISIBLE_DEVICES": "0,1"}, "tgis serve") == read()
