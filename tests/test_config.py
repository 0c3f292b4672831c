"""Options: flags, variables and defaults, and the errors for invalid values."""

import inspect
import os
import shlex
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import get_args

import pytest
from config_parsing import read, refusal
from hypothesis import given, settings
from hypothesis import strategies as st

from tgis import config
from tgis.config import Config, parse
from tgis.errors import OptionError
from tgis.foreign_options import foreign_options
from tgis.speculative_config import SpeculativeConfig
from tgis.utils.options import Option, Secret, declared_options, flag_name

DRAFT_JSON = '{"method": "draft_model", "model": "a/b", "num_speculative_tokens": 5}'
MLP_JSON = '{"method": "mlp_speculator", "model": "c", "revision": "c"}'
DRAFT = SpeculativeConfig(method="draft_model", model="a/b", num_speculative_tokens=5)
MLP = SpeculativeConfig(method="mlp_speculator", model="c", revision="c")
Sample = tuple[str, object]  # a value as text, and what it is
# Two values of the options that do not take any text, number or path; the first is not the default.
SPECIAL: dict[str, tuple[Sample, Sample]] = {
    "served_model_name": (("a", ("a",)), ("b,c d", ("b", "c", "d"))),
    "deployment_framework": (("tgis_native", "tgis_native"), ("hf_custom_tp", "tgis_native")),
    "dtype": (("float32", "float32"), ("bfloat16", "bfloat16")),
    "quantize": (("int8", "int8"), ("gptq_marlin", "gptq_marlin")),
    "quantize_activations": (("none", "none"), ("int8", "int8")),
    "estimate_memory": (("manual", "manual"), ("off", "off")),
    "kv_cache_dtype": (("int8", "int8"), ("auto", "auto")),
    "cpu_isa": (("none", "none"), ("avx2", "avx2")),
    "speculation": (("auto", "auto"), ("auto", "auto")),  # another would make the options of speculators ineffective
    "speculation_max_tokens": (("5", 5), ("0", 0)),  # the first is that of the next one
    "speculative_config": ((DRAFT_JSON, DRAFT), (MLP_JSON, MLP)),
    "lora_modules": (("a=/x b=y=z", {"a": "/x", "b": "y=z"}), ('{"name": "a", "path": "/x"}', {"a": "/x"})),
    "bind_address": (("127.0.0.1", "127.0.0.1"), ("::", "::")),
    "generation_config": (("none", "none"), ("auto", "auto")),
    "api_key": (("a", Secret("a")), ("b c", Secret("b c"))),
    "cors_allow_origin": (("*", ("*",)), ("https://a, https://b", ("https://a", "https://b"))),
    "allowed_hosts": (("a.b", ("a.b",)), ("a, *", ("a", "*"))),
    "http_api": (("true", True), ("0", False)),  # without it, HTTP_API_PORT has no effect
    "otlp_endpoint": (("c:4317", "c:4317"), ("http://c:1", "http://c:1")),
    "strict_options": (("true", True), ("false", False)),  # the others have warnings
    "log_level": (("debug", "debug"), ("info,h2=off", "info,h2=off")),
}
# Of any other type: what text means, and texts of which each option takes two.
TEXTS: dict[type, tuple[Callable[[str], object], list[str]]] = {
    str: (str, ["a/b", "c"]),
    int: (int, ["62", "63", "1536", "1537"]),
    float: (float, ["0.5", "1", "2.5", "1e2"]),
    Path: (Path, ["/", "/tmp"]),
}


def samples(row: Option) -> tuple[Sample, Sample]:
    if row.name in SPECIAL:
        return SPECIAL[row.name]
    kind = inspect.get_annotations(Config)[row.name]
    kind = (get_args(kind) or (kind,))[0]
    if kind is bool:
        default = row.shown_default == "true"
        return (str(not default), not default), (str(int(not default)), not default)
    meaning, texts = TEXTS[kind]
    first, second, *_ = [text for text in texts if accepts(row, text)]
    return (first, meaning(first)), (second, meaning(second))


def accepts(row: Option, text: str) -> bool:
    with suppress(ValueError):
        row.value_type.parse(text)
        return True
    return False


SAMPLES = {row.name: samples(row) for row in declared_options(Config)}


@pytest.fixture
def no_tls_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "_validate", lambda _config: None)


@pytest.mark.usefixtures("no_tls_check")
def test_flags_override_variables_and_defaults() -> None:
    first, second = ({name: pair[at] for name, pair in SAMPLES.items()} for at in (0, 1))
    default, variables = read(), {name.upper(): text for name, (text, _) in first.items()}
    unchanged = {name for name, (_, value) in first.items() if getattr(default, name) == value}
    assert unchanged <= {"http_api", "speculation"}
    flags = [(flag_name(name), text) for name, (text, _) in second.items()]
    for argv, wanted in (
        ([], first),
        ([word for flag in flags for word in flag], second),
        (list(map("=".join, flags)), second),
    ):
        got = read(*argv, **variables)
        assert {name: getattr(got, name) for name in SAMPLES} == {name: value for name, (_, value) in wanted.items()}


@pytest.mark.parametrize("blank", ["", " ", "\n"])
def test_a_blank_variable_is_unset(blank: str) -> None:
    assert read(**{name.upper(): blank for name in SAMPLES if name != "model_name"}) == read()


def from_shell(line: str) -> tuple[list[str], dict[str, str]]:
    """Flags and variables of `NAME=value ... --flag value ...`."""
    words = shlex.split(line)
    variables = dict(word.split("=", 1) for word in words if word[:1].isupper() and "=" in word)
    return words[len(variables) :], variables


CLUSTER = "NUM_SHARD=4 CLUSTER_SECRET_PATH=/s "
TORCHRUN = "GROUP_WORLD_SIZE=2 GROUP_RANK=1 MASTER_ADDR=a MASTER_PORT=7 LOCAL_WORLD_SIZE=1 "
NODE = {"nnodes": 2, "node_rank": 1, "master_addr": "a"}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", {"grpc_port": 8033, "port": 3000, "max_new_tokens": 1024, "default_max_new_tokens": 20}),
        (
            "MAX_TOTAL_TOKENS=100 MAX_INPUT_LENGTH=50 VALIDATION_WORKERS=3",
            {"max_sequence_length": 100, "max_input_tokens": 50, "tokenization_workers": 3},
        ),
        ("--hostname ::1 -p 1 -g 2", {"bind_address": "::1", "port": 1, "grpc_port": 2}),
        ("HOSTNAME=a-container", {"bind_address": read().bind_address}),
        ("JSON_OUTPUT=TRUE", {"json_output": True}),
        ("JSON_OUTPUT=1", {"json_output": True}),
        ("--otlp-endpoint https://[::1]:4317", {"otlp_endpoint": "https://[::1]:4317"}),
        ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=collector:4317", {"otlp_endpoint": "collector:4317"}),
        ("--json-output --port 1", {"json_output": True, "port": 1}),
        ("JSON_OUTPUT=true --json-output false", {"json_output": False}),
        ("PORT=0 GRPC_PORT=0", {"port": 0}),
        ("QUANTIZE=int8", {"quantize": "int8"}),
        ("DTYPE_STR=int8", {"quantize": "int8", "dtype": "auto"}),
        ("DTYPE=int8 QUANTIZE=bitsandbytes", {"quantize": "bitsandbytes"}),
        ("QUANTIZE=false", {"quantize": "none"}),
        ("DTYPE=float16 DTYPE_STR=float16", {"dtype": "float16"}),
        ("DTYPE_STR=float16 --dtype float32", {"dtype": "float32"}),
        ("NUM_GPUS=2", {"num_shard": 2, "engine": "tgis_native"}),
        ("CUDA_VISIBLE_DEVICES=0,1 NVIDIA_VISIBLE_DEVICES=all", {"num_shard": 1}),
        ("FLASH_ATTENTION=true DEPLOYMENT_FRAMEWORK=auto", {"engine": "tgis_native"}),
        ("TRUST_REMOTE_CODE=False SPECULATOR_N_CANDIDATES=none", {}),
        ("OMP_NUM_THREADS=1 PIP_CACHE_DIR=1 TGIS_GRPC_PORT=1 HTTP_PORT=1 TORCH_HOME=1 XDG_CACHE_HOME=1", {}),
        (CLUSTER + "NNODES=2 NODE_RANK=1 MASTER_ADDR=a MASTER_PORT=7", NODE | {"master_port": 7}),
        ("CLUSTER_SECRET_PATH=/s --nnodes 2 --node-rank 1 --master-addr a -tp 4", NODE | {"master_port": 29500}),
        (CLUSTER + "LWS_GROUP_SIZE=2 LWS_WORKER_INDEX=1 LWS_LEADER_ADDRESS=a", NODE | {"master_port": 29500}),
        (CLUSTER + TORCHRUN, NODE | {"master_port": 7}),
        (CLUSTER + TORCHRUN + "TORCHELASTIC_USE_AGENT_STORE=True", NODE | {"master_port": 8}),
    ],
)
def test_what_options_mean(line: str, expected: dict[str, object]) -> None:
    argv, variables = from_shell(line)
    config = read(*argv, **variables)
    assert {name: getattr(config, name) for name in expected} == expected
    assert config.warnings == ()


@pytest.mark.parametrize(
    ("line", "warning"),
    [
        ("WAITING_SERVED_RATIO=1.2", "ignored options: WAITING_SERVED_RATIO"),
        ("MAX_BATCHSIZE=1", "MAX_BATCHSIZE is no option: did you mean MAX_BATCH_SIZE?"),
        ("NUM_GPU=1", "NUM_GPU is no option: did you mean NUM_GPUS?"),
        (
            "FLASH_ATTENTION=true DEPLOYMENT_FRAMEWORK=hf_transformers",
            "DEPLOYMENT_FRAMEWORK='hf_transformers': using tgis_native, which FLASH_ATTENTION needs",
        ),
        (
            "NUM_SHARD=2 DEPLOYMENT_FRAMEWORK=hf_transformers",
            "DEPLOYMENT_FRAMEWORK='hf_transformers': using tgis_native, which NUM_SHARD needs",
        ),
        ("--speculator-name a --speculation off", "SPECULATOR_NAME='a' has no effect: SPECULATION is off"),
        ("--speculator-name a --speculation lookup", "SPECULATOR_NAME='a' has no effect: SPECULATION is lookup"),
        ("--speculator-revision a", "SPECULATOR_REVISION='a' has no effect"),
        ("KV_CACHE_DTYPE=fp8_e5m2", "KV_CACHE_DTYPE='fp8_e5m2': using int8"),
        ("HTTP_API=false HTTP_API_PORT=1", "HTTP_API_PORT=1 has no effect: HTTP_API is false"),
    ],
)
def test_what_has_no_effect_is_a_warning_or_refused(line: str, warning: str) -> None:
    argv, variables = from_shell(line)
    (said,) = read(*argv, **variables).warnings
    assert said.startswith(warning)
    assert refusal(*argv, "--strict-options", **variables) == f"STRICT_OPTIONS: {said}"


WHOLE = "must be a whole number from 0 to"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("PORT=65536", f"PORT='65536' {WHOLE} 65535"),
        ("PORT=8033.5", f"PORT='8033.5' {WHOLE} 65535"),
        ("--port=1_0", f"--port='1_0' {WHOLE} 65535"),
        ("PORT=٣", f"PORT='٣' {WHOLE} 65535"),
        ("PORT=" + "9" * 5000, "PORT='999999"),
        ("RANDOM_SEED=18446744073709551616", f"RANDOM_SEED='18446744073709551616' {WHOLE} 18446744073709551615"),
        ("MAX_NEW_TOKENS=0", "MAX_NEW_TOKENS='0' must be a whole number from 1 to 2147483647"),
        ("MAX_PREFILL_PADDING=nan", "MAX_PREFILL_PADDING='nan' must be a number from 0 to 1"),
        ("CUDA_PROCESS_MEMORY_FRACTION=0", "CUDA_PROCESS_MEMORY_FRACTION='0' must be a number above 0, at most 1"),
        ("JSON_OUTPUT=yes", "JSON_OUTPUT='yes' must be true or false"),
        ("BIND_ADDRESS=example.org", "BIND_ADDRESS='example.org' must be an IP address or localhost"),
        ("DTYPE=float8", "DTYPE='float8' must be one of auto, float32, float16, bfloat16, int8"),
        (
            "DEPLOYMENT_FRAMEWORK=vllm",
            "DEPLOYMENT_FRAMEWORK='vllm' must be one of auto, tgis_native, hf_transformers, ",
        ),
        ("QUANTIZE=int3", "QUANTIZE='int3' must be one of none, int8, int4, "),
        (
            "OTLP_ENDPOINT=http://:4317",
            "OTLP_ENDPOINT='http://:4317' must be HOST:PORT, or that after http:// or https",
        ),
        ("OTLP_ENDPOINT=c:999999", "OTLP_ENDPOINT='c:999999' must be HOST:PORT, or that after http:// or https://"),
        ("MODEL_NAME=a\0b", "MODEL_NAME='a\\x00b' must be printable text"),
        (
            "MODEL_NAME= MAX_BATCH_SIZE=0 --port 70000",
            "MODEL_NAME is required (or pass --model-name); MAX_BATCH_SIZE='0' must be a whole number from 1 to 65536; "
            "--port='70000' must be a whole number from 0 to 65535",
        ),
        ("--revision ''", "--revision='' must not be empty"),
        ("--zzz 1", "unrecognized arguments: --zzz 1 (see tgis serve --help)"),
        ("--port", "argument -p/--port: expected one argument (see tgis serve --help)"),
        ("--max-tokens=3", "unrecognized arguments: --max-tokens=3, did you mean --max-new-tokens? (see"),
        ("PORT=9000 GRPC_PORT=9000", "PORT and GRPC_PORT are both 9000"),
        ("DTYPE=float16 DTYPE_STR=float32", "DTYPE='float16' and DTYPE_STR='float32' must be the same"),
        ("--num-shard 1 --num-gpus 2", "--num-shard='1' and --num-gpus='2' must be the same"),
        (
            "NUM_SHARD=2 DEPLOYMENT_FRAMEWORK=hf_optimum_ort",
            "NUM_SHARD=2 needs the engine tgis_native, not hf_optimum_ort",
        ),
        (CLUSTER + "NNODES=3", "NUM_SHARD=4 must be a multiple of NNODES=3"),
        (CLUSTER + "NNODES=2 NODE_RANK=2 MASTER_ADDR=a", "NODE_RANK=2 must be below NNODES=2"),
        ("GROUP_RANK=1", "GROUP_RANK=1 must be below NNODES=1"),
        (CLUSTER + "GROUP_WORLD_SIZE=2", "GROUP_WORLD_SIZE=2 needs MASTER_ADDR"),
        (CLUSTER + "NNODES=2 MASTER_ADDR=a CLUSTER_INTERFACE=no", "CLUSTER_INTERFACE=no is none of lo"),
        ("NUM_SHARD=2 NNODES=2 MASTER_ADDR=a", "NNODES=2 needs CLUSTER_SECRET_PATH"),
        ("LOCAL_WORLD_SIZE=2", "LOCAL_WORLD_SIZE='2' is not supported: one process per node starts its ranks"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(line: str, said: str) -> None:
    argv, variables = from_shell(line)
    message = refusal(*argv, **variables)
    assert message.startswith(said)
    assert len(message) < 300


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ('{"method": "eagle"}', "Invalid enum value 'eagle'"),
        ('{"method": "ngram", "draft": 1}', "`draft`"),
        ('{"method": "ngram", "model": "a"}', "ngram and suffix have none"),
        ('{"method": "draft_model"}', "draft_model and mlp_speculator need a model"),
        ("[" * 5000, "must be JSON"),
        ('{"method": "ngram", "num_speculative_tokens": 64}', "<= 63"),
    ],
)
def test_a_speculative_config_that_cannot_be_used_is_refused(config: str, said: str) -> None:
    assert said in refusal("--speculative-config", config)
    assert "SPECULATOR_NAME='c' and" in refusal("--speculative-config", DRAFT_JSON, "--speculator-name", "c")


def test_a_key_is_shown_nowhere() -> None:
    config = read(API_KEY="hidden")
    assert "hidden" not in repr(config) + str(config.api_key)
    assert "hidden" not in refusal(API_KEY="hidden\n!")


def test_names_of_models(tmp_path: Path) -> None:
    assert read("--model-name", f"{tmp_path}/").shown_model == tmp_path.name
    assert read("--model-name", "org/name").shown_model == "org/name"


def test_the_hub_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/h")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert read().hub_cache == Path("/h/.cache/huggingface/hub")
    assert read(HF_HOME="/hf").hub_cache == Path("/hf/hub")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert read().hub_cache == Path("/x/huggingface/hub")
    for name in ("HF_HUB_CACHE", "TRANSFORMERS_CACHE", "HUGGINGFACE_HUB_CACHE"):
        assert read(HF_HOME="/hf", **{name: "/c"}).hub_cache == Path("/c")
    assert read(HF_HUB_CACHE="/c", TRANSFORMERS_CACHE="/c/").hub_cache == Path("/c")
    assert "must be the same" in refusal(HF_HUB_CACHE="/c", HUGGINGFACE_HUB_CACHE="/d")


def test_the_cache_dir_is_per_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TMPDIR", raising=False)
    assert read().cache_dir == Path(f"/tmp/tgis-{os.getuid()}")
    monkeypatch.setenv("TMPDIR", "/t")
    assert read().cache_dir == Path(f"/t/tgis-{os.getuid()}")


ANY_NAME = st.sampled_from(
    [name for row in declared_options(Config) for name in row.names]
    + [name for row in foreign_options(None) for name in row.option.names]
)


@settings(max_examples=30)
@given(st.dictionaries(ANY_NAME, st.text(max_size=100)), st.dictionaries(ANY_NAME, st.text(max_size=100)))
def test_any_text_is_a_config_or_a_printable_error(flags: dict[str, str], variables: dict[str, str]) -> None:
    argv = [f"{flag_name(name)}={text}" for name, text in flags.items()]
    said = "fine"
    try:
        parse(argv, {name.upper(): text for name, text in variables.items()}, "tgis serve")
    except OptionError as error:
        said = str(error)
    assert said.isprintable()
