"""Options of vLLM and vllm-tgis-adapter: what they become, and what is ignored or refused by name."""

import asyncio
import re
from pathlib import Path

import pytest
import tokenizer_families
from config_parsing import read, refusal
from repository import REPOSITORY

from demo.fake_model import make_fake_model
from tgis.config import Config, parse
from tgis.errors import OptionError
from tgis.foreign_options import foreign_options
from tgis.frontend.tokenizer import EncodeOptions
from tgis.prepare import prepare
from tgis.utils.options import Option, declared_options, flag_name

ADAPTER = "python -m vllm_tgis_adapter"


def read_as_adapter(*argv: str, **environ: str) -> Config:
    return parse(list(argv), environ, ADAPTER, as_adapter=True)


def refusal_as_adapter(*argv: str, **environ: str) -> str:
    with pytest.raises(OptionError) as caught:
        read_as_adapter("--model", "m", *argv, **environ)
    return str(caught.value)


@pytest.mark.parametrize(
    ("flags", "field", "value"),
    [
        ("--model /m", "model_name", "/m"),
        ("--max-model-len 4096", "max_sequence_length", 4096),
        ("--max-model-len 4k", "max_sequence_length", 4000),
        ("--max-model-len 4K", "max_sequence_length", 4096),
        ("--max-model-len 25.6k", "max_sequence_length", 25600),
        ("--tensor-parallel-size 2", "num_shard", 2),
        ("-tp 2", "num_shard", 2),
        ("--max_model_len 4096", "max_sequence_length", 4096),
        ("--download_dir=/a_b", "hub_cache", "/a_b"),
        ("--gpu-memory-utilization 0.9", "cuda_process_memory_fraction", 0.9),
        ("--dtype auto", "dtype", "auto"),
        ("--dtype half", "dtype", "float16"),
        ("--dtype float", "dtype", "float32"),
        ("--dtype fp16", "dtype", "float16"),
        ("--dtype bf16", "dtype", "bfloat16"),
        ("--max-num-seqs 16", "max_batch_size", 16),
        ("--max-num-batched-tokens 2048", "max_batch_prefill_tokens", 2048),
        ("--host 127.0.0.1", "bind_address", "127.0.0.1"),
        ("--host localhost", "bind_address", "127.0.0.1"),
        ("--host ::", "bind_address", "::"),
        ("--port 8001", "port", 8001),
        ("--grpc-port 8034", "grpc_port", 8034),
        ("--max-logprobs 20", "max_top_n_tokens", 20),
        ("--seed 7", "random_seed", 7),
        ("--speculative-model [ngram]", "speculation", "lookup"),
        ("--num-speculative-tokens 5", "speculation_max_tokens", 5),
        ("--speculate 3", "speculation_max_tokens", 3),
        ('--speculative-config {"method":"ngram","num_speculative_tokens":4}', "speculation", "lookup"),
        ('--speculative-config {"method":"suffix","num_speculative_tokens":4}', "speculation_max_tokens", 4),
        ('--speculative-config {"method":"draft_model","model":"a/b"}', "speculator_name", "a/b"),
        ('--speculative-config {"method":"mlp_speculator","model":"a/b"}', "speculation", "auto"),
        ('--speculative-config {"method":"draft_model","model":"a","revision":"r"}', "speculator_revision", "r"),
        ("--speculative-model a/b", "speculator_name", "a/b"),
        ("--speculator-name a/b", "speculation", "auto"),
        ("--enable-prefix-caching", "prefix_cache", True),
        ("--no-enable-prefix-caching", "prefix_cache", False),
        ("--disable-log-requests", "log_requests", False),
        ("--no-enable-log-requests", "log_requests", False),
        ("--enable-log-requests", "log_requests", True),
        ("--download-dir /hub", "hub_cache", "/hub"),
        ("--revision v1", "revision", "v1"),
        ("--served-model-name one two", "served_model_name", "one"),
        ("--load-format gguf", "quantize", "gguf"),
        ("--load-format bitsandbytes --quantization bitsandbytes", "quantize", "bitsandbytes"),
        ("--load-format safetensors --quantization awq", "quantize", "awq"),
    ],
)
def test_flags_of_vllm_are_flags_of_the_adapter(flags: str, field: str, value: object) -> None:
    got = read_as_adapter(*flags.split(), **({} if "--model " in flags else {"MODEL_NAME": "m"}))
    found = getattr(got, field)
    assert (str(found) if field == "hub_cache" else found) == value
    assert got.warnings == ()


@pytest.mark.parametrize("option", [option for option in declared_options(Config) if option.vllm_names])
def test_elsewhere_the_error_for_a_flag_of_vllm_names_ours(option: Option) -> None:
    for name in option.vllm_names:
        text = re.escape(f"unrecognized flag {flag_name(name)}: here it is {flag_name(option.name)}")
        assert re.match(text, refusal(flag_name(name), "1"))
    assert refusal("--disable-log-requests").startswith(
        "unrecognized flag --disable-log-requests: here it is --log-requests false ("
    )


def test_flags_of_vllm_without_a_counterpart_are_unknown_elsewhere() -> None:
    assert refusal("--swap-space", "4") == "unrecognized arguments: --swap-space 4 (see tgis serve --help)"


def test_lora_modules() -> None:
    one, two = '{"name": "one", "path": "/a b", "base_model_name": "m"}', '{"name": "two", "path": "c"}'
    both = {"one": "/a b", "two": "c"}
    assert read("--lora-modules", one, two, "--port", "1").lora_modules == both
    assert read("--lora-modules", "one=/a", two).lora_modules == {"one": "/a", "two": "c"}
    assert read("--lora-modules", "one=/a", "two=c").lora_modules == {"one": "/a", "two": "c"}
    for text in (f"[{one}, {two}]", f"{one} {two}", f"{one}\n{two}"):
        assert read(LORA_MODULES=text).lora_modules == both


@pytest.mark.parametrize("text", ["a", "a=", "=/x", "{", "[1]", '{"name": "a"}', '{"name": "", "path": "x"}', "a=b {}"])
def test_lora_modules_without_name_or_path(text: str) -> None:
    bound = "must be name=path ... or JSON objects with a name and a path"
    assert refusal(LORA_MODULES=text) == f"LORA_MODULES={text!r} {bound}"
    assert refusal("--lora-modules", text) == f"--lora-modules={text!r} {bound}"


def test_a_name_of_two_lora_modules() -> None:
    assert refusal(LORA_MODULES="a=x a=y") == "LORA_MODULES='a=x a=y' has the same name twice"
    assert refusal("--lora-modules") == "--lora-modules='' must not be empty"


def test_tls_flags_of_vllm() -> None:
    got = read_as_adapter("--model", "m", "--ssl-certfile", "c", "--ssl-keyfile", "k", "--ssl-ca-certs", "a")
    assert [str(got.tls_cert_path), str(got.tls_key_path), str(got.tls_client_ca_cert_path)] == ["c", "k", "a"]


def test_what_is_always_on_is_accepted_without_a_word() -> None:
    flags = "--enable-lora --enable-chunked-prefill --no-trust-remote-code --port 1"
    assert read_as_adapter("--model", "m", *flags.split()) == read_as_adapter("--model", "m", "--port", "1")


def test_names_of_vllm_are_variables_in_the_adapter_only() -> None:
    names = {"MODEL": "m", "HOST": "127.0.0.1", "SEED": "7", "MAX_NUM_SEQS": "16", "DISABLE_LOG_REQUESTS": "true"}
    got = read_as_adapter(**names)
    assert (got.model_name, got.bind_address, got.random_seed, got.max_batch_size) == ("m", "127.0.0.1", 7, 16)
    assert not got.log_requests
    assert read(**names) == read()
    assert read_as_adapter(MODEL="m", NO_ENABLE_PREFIX_CACHING="true", CONFIG="x") == read_as_adapter(
        MODEL="m"
    )  # flags
    assert read_as_adapter(MODEL="m", ENABLE_PREFIX_CACHING="false").prefix_cache is False
    assert read_as_adapter("--max-num-seqs", "8", **names).max_batch_size == 8


def test_names_of_one_option_must_agree() -> None:
    assert refusal_as_adapter("--max-num-seqs", "8", "--max-batch-size", "9") == (
        "--max-batch-size='9' and --max-num-seqs='8' must be the same"
    )
    with pytest.raises(OptionError, match="MAX_SEQUENCE_LENGTH='9' and MAX_MODEL_LEN='8' must be the same"):
        read_as_adapter(MODEL="m", MAX_MODEL_LEN="8", MAX_SEQUENCE_LENGTH="9")
    refused = "--enable-prefix-caching='true' and --no-enable-prefix-caching='true' must be the same"
    assert refusal_as_adapter("--enable-prefix-caching", "--no-enable-prefix-caching") == refused


def test_defaults_of_the_adapter() -> None:
    got = read_as_adapter(MODEL_NAME="m", PORT=" ")
    assert (got.port, got.grpc_port, got.default_max_new_tokens) == (8000, 8033, 0)
    got = read_as_adapter(MODEL_NAME="m", PORT="3000", DEFAULT_MAX_NEW_TOKENS="20")
    assert (got.port, got.default_max_new_tokens) == (3000, 20)
    assert read_as_adapter(MODEL_NAME="m", ADD_SPECIAL_TOKENS="0").add_special_tokens is False
    assert str(read_as_adapter(MODEL_NAME="m", TERMINATION_LOG_DIR="/t").termination_log) == "/t"


@pytest.mark.parametrize(("value", "added"), [("true", True), ("0", False)])
def test_special_tokens_are_added_unless_told_otherwise(
    value: str, added: bool, cache_dir: Path, tmp_path: Path
) -> None:
    model = tokenizer_families.write(
        make_fake_model(tmp_path), tokenizer_families.description("byte_fallback", cache_dir)
    )
    environ = {"MODEL_NAME": str(model), "DEPLOYMENT_FRAMEWORK": "fake", "ADD_SPECIAL_TOKENS": value}
    preparation = prepare(read_as_adapter(**environ, CACHE_DIR=str(tmp_path)))
    (encoding,) = asyncio.run(preparation.tokenizer.encode(["The first"], EncodeOptions()))
    assert (preparation.tokenizer.token_text(encoding.ids[0]) == "<s>") is added


def test_other_flags_of_vllm_are_named_in_one_warning() -> None:
    flags = "--block-size 16 --enforce-eager --cuda-graph-sizes 1 2 4 --no-async-scheduling --swap_space=4 -O3"
    got = read_as_adapter("--model", "m", *flags.split(), "--compilation-config.level=3", "--port", "1")
    assert got.port == 1
    (warning,) = got.warnings
    assert warning.startswith("ignored options: ")
    assert set(warning.removeprefix("ignored options: ").split(", ")) == {
        *("--block-size", "--enforce-eager", "--cuda-graph-sizes", "--no-async-scheduling", "--swap-space"),
        *("--optimization-level", "--compilation-config"),
    }


def test_other_variables_of_vllm_are_named_by_the_adapter_only() -> None:
    names = {"BLOCK_SIZE": "16", "ROOT_PATH": "/a", "VLLM_LOGGING_LEVEL": "DEBUG"}
    ignored = "ignored options: BLOCK_SIZE, ROOT_PATH, VLLM_LOGGING_LEVEL"
    assert read_as_adapter(MODEL="m", **names).warnings == (ignored,)
    assert read(**names).warnings == ()


def test_variables_of_other_programs_are_not_taken_for_misspelt_names_of_vllm() -> None:
    assert read_as_adapter(MODEL="m", SSL_CERT_FILE="/etc/ssl/cert.pem", HOSTNAME="pod").warnings == ()


def test_the_docs_name_every_flag_of_vllm_that_is_not_ignored() -> None:
    section = (
        (REPOSITORY / "docs/compatibility.md").read_text().split("## Command lines of vllm-tgis-adapter and vLLM\n")[1]
    )
    documented = set(re.findall(r"`--([a-z-]+)`", section.split("\n## ")[0]))
    foreign = [row.option for row in foreign_options(()) if row.verdict != "warned"]
    names = [name for opt in declared_options(Config) for name in opt.vllm_names] + [opt.name for opt in foreign]
    known = {name.replace("_", "-") for name in names}
    assert {name for name in known - documented if not name.startswith("no-")} == set()


def test_every_foreign_option_gets_its_verdict() -> None:
    rows = list(foreign_options(()))
    assert len({row.option.name for row in rows}) == len(rows)
    assert {row.verdict for row in rows} == {"honoured", "warned", "refused"}
    for row in rows:
        flag = flag_name(row.option.name)
        if row.verdict == "refused":
            assert refusal_as_adapter(flag, "x") == f"{flag}='x' is not supported: {row.reason}"
        else:
            said = f"{flag}='x' has no effect: {row.reason}" if row.reason else f"ignored options: {flag}"
            expected = () if row.verdict == "honoured" else (said,)
            assert read_as_adapter("--model", "m", flag, "x").warnings == expected
        for text in row.harmless:
            assert read_as_adapter("--model", "m", flag, text).warnings == ()


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--task embed", "--task='embed' is not supported: only text generation is supported"),
        ("--runner pooling", "--runner='pooling' is not supported: only text generation is supported"),
        ("--tokenizer other", "--tokenizer='other' is not supported: the tokenizer must be in the model's directory"),
        ("--config c.yaml", "--config='c.yaml' is not supported: set the options as flags or variables"),
        (
            "--pipeline-parallel-size 2",
            "--pipeline-parallel-size='2' is not supported: a model is split by --tensor-parallel-size only",
        ),
        ("--data-parallel-size 2", "--data-parallel-size='2' is not supported: start one server per replica"),
        ("--hf-overrides {\"a\":1}", "is not supported: the configuration is read from the model's directory"),
    ],
)  # fmt: skip
def test_what_would_serve_something_else_is_refused(flags: str, reason: str) -> None:
    assert refusal_as_adapter(*flags.split()).endswith(reason)


def test_what_changes_nothing_is_not_refused() -> None:
    flags = "--task generate --runner auto --convert none --tokenizer m --hf-overrides {}"
    flags += " --pipeline-parallel-size 1 --data-parallel-size 1 --nnodes 1"
    assert read_as_adapter("--model", "m", *flags.split()) == read_as_adapter("--model", "m")
