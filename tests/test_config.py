"""Options: flags, variables and defaults, and the errors for invalid values."""

import inspect
import os
import shlex
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

import pytest
from config_parsing import read, refusal
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import read_table, table

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


def test_flags_override_variables_and_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "_validate", lambda _config: None)  # these values need not go together
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


@table("options", "meanings")
def test_what_options_mean(row: dict[str, Any]) -> None:
    argv, variables = from_shell(row["line"])
    config = read(*argv, **variables)
    assert {name: getattr(config, name) for name in row["expected"]} == row["expected"]
    assert config.warnings == ()


@table("options", "warnings")
def test_what_has_no_effect_is_a_warning_or_refused(row: dict[str, str]) -> None:
    argv, variables = from_shell(row["line"])
    (said,) = read(*argv, **variables).warnings
    assert said.startswith(row["said"])
    assert refusal(*argv, "--strict-options", **variables) == f"STRICT_OPTIONS: {said}"


@table("options", "refused")
def test_what_is_wrong_is_said_in_one_line(row: dict[str, str]) -> None:
    argv, variables = from_shell(row["line"])
    message = refusal(*argv, **variables)
    assert message.startswith(row["said"])
    assert len(message) < 300


def test_every_bound() -> None:
    bounds = read_table("options", "bounds")
    said = refusal(**dict(line.split("=") for line in bounds)).split("; ")
    assert {*said} == {line.replace("=", "='") + f"' must be {bound}" for line, bound in bounds.items()}


@table("options", "speculative")
def test_a_speculative_config_that_cannot_be_used_is_refused(row: dict[str, str]) -> None:
    assert row["said"] in refusal(*from_shell(row["line"])[0])
    assert "SPECULATOR_NAME='c' and" in refusal("--speculative-config", DRAFT_JSON, "--speculator-name", "c")
    given = read("--speculative-config", '{"method": "ngram"}', "--speculation-max-tokens", "7")
    assert (given.speculation, given.speculation_max_tokens) == ("lookup", 7)


def test_the_error_of_a_long_text_is_short() -> None:
    assert len(refusal(PORT="9" * 5000)) < 300
    for text in ('{"' + "a" * 5000 + '": 1}', "\udc80"):
        said = refusal("--speculative-config", text)
        assert "must be JSON" in said
        assert len(said) < 400


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
