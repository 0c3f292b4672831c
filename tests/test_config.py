"""Options: flags, variables and defaults, and the errors for invalid values."""

import inspect
import os
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
    "served_model_name": (("a", "a"), ("b c", "b")),
    "deployment_framework": (("tgis_native", "tgis_native"), ("hf_custom_tp", "tgis_native")),
    "dtype": (("float32", "float32"), ("bfloat16", "bfloat16")),
    "quantize": (("int8", "int8"), ("gptq_marlin", "gptq_marlin")),
    "quantize_activations": (("none", "none"), ("int8", "int8")),
    "estimate_memory": (("manual", "manual"), ("off", "off")),
    "kv_cache_dtype": (("int8", "int8"), ("fp8_e4m3", "fp8")),
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
    assert {name for name, (_, value) in first.items() if getattr(default, name) == value} <= {"speculation"}
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


def test_defaults_are_those_of_tgis() -> None:
    defaults = read()
    assert (defaults.grpc_port, defaults.port) == (8033, 3000)
    assert (defaults.max_new_tokens, defaults.default_max_new_tokens) == (1024, 20)
    assert (defaults.default_include_stop_seqs, defaults.output_special_tokens) == (True, False)
    assert defaults.warnings == ()


def test_names_of_tgi() -> None:
    names = {"MAX_TOTAL_TOKENS": "100", "MAX_INPUT_LENGTH": "50", "VALIDATION_WORKERS": "3"}
    got = read(**names, HOSTNAME="a-container", WAITING_SERVED_RATIO="1.2")
    assert (got.max_sequence_length, got.max_input_tokens, got.tokenization_workers) == (100, 50, 3)
    assert got.bind_address == read().bind_address
    assert got.warnings == ("ignored options: WAITING_SERVED_RATIO",)
    assert read("--hostname", "::1", "-p", "1", "-g", "2").port == 1
    assert parse(["--model-id", "a"], {}, "tgis serve").model_name == "a"


def test_a_key_is_shown_nowhere() -> None:
    config = read(API_KEY="hidden")
    assert "hidden" not in repr(config) + str(config.api_key)
    assert "hidden" not in refusal(API_KEY="hidden\n!")


@pytest.mark.parametrize("text", ["true", "TRUE", "True", "1"])
def test_booleans(text: str) -> None:
    assert read(JSON_OUTPUT=text).json_output
    assert read("--json-output", text).json_output
    assert read("--json-output").json_output
    assert read("--json-output", "--port", "1").port == 1
    assert not read("--json-output", "false", JSON_OUTPUT=text).json_output


@pytest.mark.parametrize(
    ("name", "text", "bound"),
    [
        ("PORT", "65536", "must be a whole number from 0 to 65535"),
        ("PORT", "8033.5", "must be a whole number from 0 to 65535"),
        ("RANDOM_SEED", "18446744073709551616", "must be a whole number from 0 to 18446744073709551615"),
        ("PORT", "1_0", "must be a whole number from 0 to 65535"),
        ("PORT", "٣", "must be a whole number from 0 to 65535"),
        ("PORT", "9" * 5000, "must be a whole number from 0 to 65535"),
        ("MAX_NEW_TOKENS", "0", "must be a whole number from 1 to 2147483647"),
        ("MAX_PREFILL_PADDING", "nan", "must be a number from 0 to 1"),
        ("CUDA_PROCESS_MEMORY_FRACTION", "0", "must be a number above 0, at most 1"),
        ("JSON_OUTPUT", "yes", "must be true or false"),
        ("BIND_ADDRESS", "example.org", "must be an IP address or localhost"),
        ("DTYPE", "float8", "must be one of auto, float32, float16, bfloat16, int8"),
        ("DEPLOYMENT_FRAMEWORK", "vllm", "must be one of auto, tgis_native, hf_transformers, hf_optimum_ort, fake"),
        ("MODEL_NAME", "a\x00b", "must be printable text"),
    ],
)
def test_an_invalid_value_is_reported_with_its_bounds(name: str, text: str, bound: str) -> None:
    said = refusal(**{name: text})
    assert said.startswith(f"{name}={text[:20]!r}"[:-1])
    assert said.endswith(f" {bound}")
    assert len(said) < 200
    assert refusal(f"{flag_name(name.lower())}={text}").startswith(f"{flag_name(name.lower())}=")


@pytest.mark.parametrize(
    ("argv", "variables", "said"),
    [
        (
            ["--port", "70000"],
            {"MODEL_NAME": "", "MAX_BATCH_SIZE": "0"},
            "MODEL_NAME is required (or pass --model-name); MAX_BATCH_SIZE='0' must be a whole number from 1 to 65536; "
            "--port='70000' must be a whole number from 0 to 65535",
        ),
        (["--revision", ""], {}, "--revision='' must not be empty"),
        (["--zzz", "1"], {}, "unrecognized arguments: --zzz 1 (see tgis serve --help)"),
        (["--port"], {}, "argument -p/--port: expected one argument (see tgis serve --help)"),
        (
            ["--max-tokens=3"],
            {},
            "unrecognized arguments: --max-tokens=3, did you mean --max-new-tokens? (see tgis serve --help)",
        ),
        ([], {"PORT": "9000", "GRPC_PORT": "9000"}, "PORT and GRPC_PORT are both 9000"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(argv: list[str], variables: dict[str, str], said: str) -> None:
    assert refusal(*argv, **variables) == said


@pytest.mark.parametrize(("name", "meant"), [("MAX_BATCHSIZE", "MAX_BATCH_SIZE"), ("NUM_GPU", "NUM_GPUS")])
def test_a_misspelt_variable_is_a_warning(name: str, meant: str) -> None:
    assert read(**{name: "1"}).warnings == (f"{name} is no option: did you mean {meant}?",)


def test_options_of_others_are_no_misspelt_ones() -> None:
    names = "OMP_NUM_THREADS PIP_CACHE_DIR HF_HUB_OFFLINE TGIS_GRPC_PORT HTTP_PORT HOSTNAME TORCH_HOME XDG_CACHE_HOME"
    assert not read(**dict.fromkeys(names.split(), "1")).warnings


@pytest.mark.parametrize(
    ("name", "neutral"), [("TRUST_REMOTE_CODE", ["false", "0", "False"]), ("SPECULATOR_N_CANDIDATES", ["none", "1"])]
)
def test_options_without_effect_that_ask_for_nothing_are_no_warnings(name: str, neutral: list[str]) -> None:
    for text in ["", *neutral]:
        assert read(**{name: text}) == read()


def test_strict_options_refuse_all_that_is_a_warning_otherwise() -> None:
    flags = ("--dtype", "int4")
    variables = {"RANK": "0", "TRUST_REMOTE_CODE": "true", "FLASH_ATTENTION": "true", "MAX_BATCHSIZE": "8"}
    variables["DEPLOYMENT_FRAMEWORK"] = "hf_optimum_ort"
    warnings = read(*flags, **variables).warnings
    assert refusal("--strict-options", *flags, **variables) == "STRICT_OPTIONS: " + "; ".join(warnings)
    named = ("--dtype=", "RANK", "TRUST_REMOTE_CODE=", "DEPLOYMENT_FRAMEWORK=", "MAX_BATCHSIZE is")
    assert all(any(name in warning for warning in warnings) for name in named)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"QUANTIZE": "int8"}, "int8"),
        ({"DTYPE_STR": "int8"}, "int8"),
        ({"DTYPE": "int8", "QUANTIZE": "bitsandbytes"}, "bitsandbytes"),
        ({"QUANTIZE": "false"}, "none"),
        ({"DTYPE": "int8", "QUANTIZE": "int4"}, "int4"),
        ({"KV_CACHE_DTYPE": "fp8_e5m2"}, "KV_CACHE_DTYPE='fp8_e5m2' must be one of auto, int8, fp8, bfloat16"),
        ({"QUANTIZE": "int3"}, "QUANTIZE='int3' must be one of none, int8, int4, "),
    ],
)
def test_quantization(options: dict[str, str], expected: str) -> None:
    if " " in expected:
        assert refusal(**options).startswith(expected)
    else:
        config = read(**options)
        assert (config.quantize, config.dtype, config.warnings) == (expected, "auto", ())


CLUSTER = {"NUM_SHARD": "4", "CLUSTER_SECRET_PATH": "/s"}
PLAIN = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "7"}
LWS = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "a"}
TORCHRUN = {"GROUP_WORLD_SIZE": "2", "GROUP_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "7", "LOCAL_WORLD_SIZE": "1"}
AGENT_STORE = {"TORCHELASTIC_USE_AGENT_STORE": "True"}


@pytest.mark.parametrize(
    ("flags", "variables", "port"),
    [
        ("", PLAIN, 7),
        ("--nnodes 2 --node-rank 1 --master-addr a -tp 4", {}, 29500),
        ("", LWS, 29500),
        ("", TORCHRUN, 7),
        ("", TORCHRUN | AGENT_STORE, 8),
    ],
)
def test_what_starts_nodes_says_which_is_which(flags: str, variables: dict[str, str], port: int) -> None:
    got = read(*flags.split(), **CLUSTER, **variables)
    assert (got.nnodes, got.node_rank, got.master_addr, got.master_port) == (2, 1, "a", port)
    assert not got.warnings


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        (CLUSTER | {"NNODES": "3"}, "NUM_SHARD=4 must be a multiple of NNODES=3"),
        (CLUSTER | PLAIN | {"NODE_RANK": "2"}, "NODE_RANK=2 must be below NNODES=2"),
        ({"GROUP_RANK": "1"}, "GROUP_RANK=1 must be below NNODES=1"),
        (CLUSTER | {"GROUP_WORLD_SIZE": "2"}, "GROUP_WORLD_SIZE=2 needs MASTER_ADDR"),
        (CLUSTER | PLAIN | {"CLUSTER_INTERFACE": "no"}, "CLUSTER_INTERFACE=no is none of lo"),
        (CLUSTER | {"NNODES": "2"}, "NNODES=2 needs MASTER_ADDR"),
        (PLAIN | {"NUM_SHARD": "2"}, "NNODES=2 needs CLUSTER_SECRET_PATH"),
        (PLAIN | {"CLUSTER_SECRET_PATH": "/s"}, "NUM_SHARD=1 must be a multiple of NNODES=2"),
        ({"LOCAL_WORLD_SIZE": "2"}, "LOCAL_WORLD_SIZE='2' is not supported: one process per node starts its ranks"),
    ],
)
def test_unusable_clusters_are_refused(variables: dict[str, str], reason: str) -> None:
    assert refusal(**variables).startswith(reason)


@pytest.mark.parametrize("name", ["FLASH_ATTENTION", "PAGED_ATTENTION"])
def test_flash_attention_overrides_the_engine(name: str) -> None:
    got = read(**{name: "true", "DEPLOYMENT_FRAMEWORK": "hf_transformers"})
    assert got.engine == "tgis_native"
    assert got.warnings == (f"DEPLOYMENT_FRAMEWORK='hf_transformers': using tgis_native, which {name} needs",)
    for same in ("auto", "tgis_native"):
        assert not read(**{name: "true", "DEPLOYMENT_FRAMEWORK": same}).warnings


def test_names_of_one_option_must_agree() -> None:
    assert read(DTYPE="float16", DTYPE_STR="float16").dtype == "float16"
    assert read(DTYPE_STR="float16").dtype == "float16"
    assert read("--dtype", "float32", DTYPE_STR="float16").dtype == "float32"  # a flag overrides every variable
    assert refusal(DTYPE="float16", DTYPE_STR="float32") == "DTYPE='float16' and DTYPE_STR='float32' must be the same"
    assert refusal("--num-shard", "1", "--num-gpus", "2") == "--num-shard='1' and --num-gpus='2' must be the same"


def test_only_tgis_native_supports_shards() -> None:
    assert read(NUM_GPUS="2").num_shard == 2
    assert read(NUM_GPUS="2").engine == "tgis_native"
    got = read(NUM_SHARD="2", DEPLOYMENT_FRAMEWORK="hf_transformers")  # TGIS's default, and there it switches too
    assert got.warnings == ("DEPLOYMENT_FRAMEWORK='hf_transformers': using tgis_native, which NUM_SHARD needs",)
    said = refusal(NUM_SHARD="2", DEPLOYMENT_FRAMEWORK="hf_optimum_ort")
    assert said == "NUM_SHARD=2 needs the engine tgis_native, not hf_optimum_ort"


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


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--speculative-config", '{"method": "eagle"}'], "Invalid enum value 'eagle'"),
        (["--speculative-config", '{"method": "ngram", "draft": 1}'], "`draft`"),
        (["--speculative-config", '{"method": "ngram", "model": "a"}'], "ngram and suffix have none"),
        (["--speculative-config", '{"method": "draft_model"}'], "draft_model and mlp_speculator need a model"),
        (["--speculative-config", DRAFT_JSON, "--speculator-name", "c"], "SPECULATOR_NAME='c' and"),
        (["--speculator-name", "a", "--speculation", "off", "--strict-options"], "no effect: SPECULATION is off"),
        (["--speculator-name", "a", "--speculation", "lookup", "--strict-options"], "SPECULATION is lookup"),
        (["--speculator-revision", "a", "--strict-options"], "SPECULATOR_REVISION='a' has no effect"),
        (["--speculative-config", "[" * 5000], "must be JSON"),
        (["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 64}'], "<= 63"),
        (["--speculative-config", '{"method": "ngram"}', "--speculation", "off"], "SPECULATION='off'"),
        (["--speculate", "64"], "from 0 to 63"),
    ],
)
def test_speculation_that_is_no_lookup_is_refused(flags: list[str], told: str) -> None:
    assert told in refusal(*flags)
