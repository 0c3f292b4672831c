"""Options of vLLM and vllm-tgis-adapter: what they become, and what is ignored or refused by name."""

import re
from typing import Any

import pytest
from config_parsing import read, refusal
from tables import table

from tgis.config import Config, parse
from tgis.errors import OptionError
from tgis.foreign_options import foreign_options
from tgis.utils.options import declared_options, flag_name


def read_as_adapter(*argv: str, **environ: str) -> Config:
    return parse(list(argv), environ, "python -m vllm_tgis_adapter", as_adapter=True)


def refusal_as_adapter(*argv: str, **environ: str) -> str:
    with pytest.raises(OptionError) as caught:
        read_as_adapter("--model", "m", *argv, **environ)
    return str(caught.value)


def test_a_command_line_of_vllm() -> None:
    flags = """--model /m --served-model-name one two --revision v1 --download-dir /hub --dtype half --max-model-len 4k
        --tensor-parallel-size 2 --gpu-memory-utilization 0.9 --max-num-seqs 16 --max-num-batched-tokens 2048 --seed 7
        --host 127.0.0.1 --port 8001 --grpc-port 8034 --max-logprobs 20 --no-enable-prefix-caching --enable-lora
        --disable-log-requests --ssl-certfile c --ssl-keyfile k --ssl-ca-certs a --enable-chunked-prefill"""
    ours = """--model-name /m --served-model-name one two --revision v1 --hf-hub-cache /hub --dtype float16
        --max-sequence-length 4000 --num-shard 2 --cuda-process-memory-fraction 0.9 --max-batch-size 16
        --max-batch-prefill-tokens 2048 --random-seed 7 --bind-address 127.0.0.1 --port 8001 --grpc-port 8034
        --max-top-n-tokens 20 --prefix-cache false --log-requests false --tls-cert-path c --tls-key-path k
        --tls-client-ca-cert-path a"""
    assert read_as_adapter(*flags.split()) == read_as_adapter(*ours.split())


@table("options", "vllm_flags")
def test_a_flag_of_vllm(row: dict[str, Any]) -> None:
    config = read_as_adapter(*row["line"].split(), MODEL_NAME="m")
    assert {name: getattr(config, name) for name in row["expected"]} == row["expected"]
    assert config.warnings == ()


def test_elsewhere_the_error_for_a_flag_of_vllm_names_ours() -> None:
    for option in declared_options(Config):
        for name in option.vllm_names:
            text = f"unrecognized flag {flag_name(name)}: here it is {flag_name(option.name)}"
            assert refusal(flag_name(name), "1").startswith(text)
    assert refusal("--swap-space", "4") == "unrecognized arguments: --swap-space 4 (see tgis serve --help)"


def test_lora_modules() -> None:
    one, two = '{"name": "one", "path": "/a b", "base_model_name": "m"}', '{"name": "two", "path": "c"}'
    assert read("--lora-modules", "one=/a", two, "--port", "1").lora_modules == {"one": "/a", "two": "c"}
    for text in (f"[{one}, {two}]", f"{one} {two}", f"{one}\n{two}"):
        assert read(LORA_MODULES=text).lora_modules == {"one": "/a b", "two": "c"}


@pytest.mark.parametrize("text", ["a=", "=/x", "{", "[1]", '{"name": "a"}', '{"name": "", "path": "x"}', "a=b {}"])
def test_lora_modules_without_name_or_path(text: str) -> None:
    bound = "must be name=path ..., names in the Hub cache or JSON objects with name and path"
    assert refusal(LORA_MODULES=text) == f"LORA_MODULES={text!r} {bound}"
    assert refusal(LORA_MODULES="a=x a=y") == "LORA_MODULES='a=x a=y' has the same name twice"


def test_names_of_vllm_are_variables_in_the_adapter_only() -> None:
    names = {"MODEL": "m", "MAX_NUM_SEQS": "16", "ENABLE_PREFIX_CACHING": "false", "BLOCK_SIZE": "16"}
    config = read_as_adapter(**names, VLLM_LOGGING_LEVEL="DEBUG", SSL_CERT_FILE="c", HOSTNAME="pod")
    assert (config.model_name, config.max_batch_size, config.prefix_cache) == ("m", 16, False)
    assert config.warnings == ("ignored options: BLOCK_SIZE, VLLM_LOGGING_LEVEL",)
    assert read(**names) == read()
    assert read_as_adapter("--max-num-seqs", "8", **names).max_batch_size == 8
    said = refusal_as_adapter(MAX_MODEL_LEN="8", MAX_SEQUENCE_LENGTH="9")
    assert said == "MAX_SEQUENCE_LENGTH='9' and MAX_MODEL_LEN='8' must be the same"


def test_defaults_of_the_adapter() -> None:
    assert read_as_adapter(MODEL="m").add_special_tokens is True
    config = read_as_adapter(MODEL_NAME="m", PORT=" ", ADD_SPECIAL_TOKENS="0")
    assert config.add_special_tokens is False
    assert (config.port, config.grpc_port, config.default_max_new_tokens) == (8000, 8033, 0)
    config = read_as_adapter(MODEL_NAME="m", PORT="3000", DEFAULT_MAX_NEW_TOKENS="20", TERMINATION_LOG_DIR="/t")
    assert (config.port, config.default_max_new_tokens, str(config.termination_log)) == (3000, 20, "/t")


def test_other_flags_of_vllm_are_named_in_one_warning() -> None:
    flags = "--block-size 16 --enforce-eager --cuda-graph-sizes 1 2 4 --no-async-scheduling --swap_space=4 -O3"
    config = read_as_adapter("--model", "m", *flags.split(), "--compilation-config.level=3", "--port", "1")
    (warning,) = config.warnings
    assert set(re.findall(r"--[\w-]+", warning)) == {
        *("--block-size", "--enforce-eager", "--cuda-graph-sizes", "--no-async-scheduling", "--swap-space"),
        *("--optimization-level", "--compilation-config"),
    }
    assert (config.port, warning[:17]) == (1, "ignored options: ")


def test_every_foreign_option_gets_its_verdict() -> None:
    rows = list(foreign_options(()))
    assert len({row.option.name for row in rows}) == len(rows)
    assert {row.verdict for row in rows} == {"honoured", "warned", "refused"}
    for row in rows:
        flag = flag_name(row.option.name)
        for text in row.harmless:
            assert read_as_adapter("--model", "m", flag, text).warnings == ()
        if row.verdict == "refused":
            assert refusal_as_adapter(flag, "x") == f"{flag}='x' is not supported: {row.reason}"
    words = [word for row in rows if row.verdict != "refused" for word in (flag_name(row.option.name), "x")]
    *reasons, ignored = sorted(read_as_adapter("--model", "m", *words).warnings)
    warned = [row for row in rows if row.verdict == "warned"]
    expected = [f"{flag_name(row.option.name)}='x' has no effect: {row.reason}" for row in warned if row.reason]
    assert reasons == sorted(expected)
    named = {flag_name(row.option.name) for row in warned if not row.reason}
    assert set(ignored.removeprefix("ignored options: ").split(", ")) == named


@table("options", "vllm_refused")
def test_what_would_serve_something_else_is_refused(row: dict[str, str]) -> None:
    assert read_as_adapter("--model", "m", row["flag"], row["harmless"]) == read_as_adapter("--model", "m")
    assert f"{row['flag']}={row['text']!r} is not supported: " in refusal_as_adapter(row["flag"], row["text"])
