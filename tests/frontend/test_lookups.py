"""tgis.frontend.lookups: what a call that names an adapter or a grammar gets, without an engine."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from harness import run_async
from scraped_metrics import make_metrics, value

from tgis import config, limits
from tgis.errors import InvalidRequest, OptionError, Overloaded, RequestError, StartError
from tgis.frontend.lookups import Lookups
from tgis.frontend.metrics import Metrics
from tgis.frontend.validation import RequestLimits
from tgis.ipc.lookups import Acquired, AdapterProblem, AdapterRef, AdapterStoreOptions, GrammarKind, GrammarSpec

Answer = Acquired | None


class FakeEngineClient:
    """Gives every lookup the same answer."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.open: list[str | GrammarSpec] = []

    async def acquire(self, target: str | GrammarSpec, _timeout: float, resources: ExitStack) -> Answer:
        self.open.append(target)
        resources.callback(self.open.remove, target)
        return self.answer


def make_client(answer: Answer, reason: str | None = None) -> tuple[Lookups, FakeEngineClient, Metrics]:
    engine: Any = FakeEngineClient(answer)
    metrics = make_metrics()
    return Lookups(engine, metrics, why_no_adapters=reason, why_no_grammars=reason), engine, metrics


def failures_and_loads(metrics: Metrics) -> tuple[float, float]:
    return value(metrics, "tgi_prompt_load_failure"), value(metrics, "tgi_prompt_load_duration_count")


@run_async
async def test_an_adapter_is_kept_until_the_call_ends() -> None:
    adapters, engine, metrics = make_client(Acquired(7, adapter=AdapterRef("a/b", 5, 2, 7, 3, 16), loaded=True))
    with ExitStack() as resources:
        assert await adapters.adapter(("adapter_id", "a/b"), resources) == AdapterRef("a/b", 5, 2, 7, 3, 16)
        assert engine.open == ["a/b"]
    assert engine.open == []
    assert failures_and_loads(metrics) == (0, 1)
    engine.answer = Acquired(8, adapter=AdapterRef("a/b", 5, 0, 8, 3))
    with ExitStack() as resources:
        await adapters.adapter(("prefix_id", "a/b"), resources)
    assert failures_and_loads(metrics) == (0, 1)


NO_STORE = "FakeEngine takes no soft prompts"
CASES: dict[str, tuple[str, Acquired | None, str]] = {  # the others are golden cases
    "no store": ("prefix_id", None, f"prefix_id supplied but {NO_STORE}"),
    "unsupported prefix": (
        "prefix_id",
        Acquired(1, problem=AdapterProblem.UNSUPPORTED, reason="LORA"),
        "adapter type LORA is not currently supported",
    ),
    "broken adapter": (
        "adapter_id",
        Acquired(1, problem=AdapterProblem.BROKEN, reason="decoder.pt is damaged"),
        "can't retrieve adapter with id 'x': decoder.pt is damaged",
    ),
    "slow": ("prefix_id", None, "can't retrieve prompt prefix with id 'x': it could not be loaded in time"),
}


@pytest.mark.parametrize("case", CASES)
@run_async
async def test_errors_use_the_words_of_tgis(case: str) -> None:
    field, answer, text = CASES[case]
    adapters, engine, metrics = make_client(answer, NO_STORE if case == "no store" else None)
    with pytest.raises(InvalidRequest) as caught, ExitStack() as resources:
        await adapters.adapter((field, "x"), resources)
    assert (str(caught.value), caught.value.field) == (text, field)
    assert failures_and_loads(metrics) == (1, 0)
    assert engine.open == []


SCHEMA = GrammarSpec(GrammarKind.JSON_SCHEMA, "{}")
GRAMMAR_CASES: dict[str, tuple[str | None, Acquired | None, RequestError]] = {
    "broken": (None, Acquired(7, "too deep"), InvalidRequest("json_schema", "json_schema: too deep")),
    "slow": (None, None, Overloaded("no grammar was compiled within 10 s")),
    "unsupported": ("none here", None, InvalidRequest("json_schema", "json_schema: none here")),
}


@pytest.mark.parametrize("case", GRAMMAR_CASES)
@run_async
async def test_a_grammar_that_cannot_be_used(case: str) -> None:
    reason, answer, expected = GRAMMAR_CASES[case]
    lookups, engine, _ = make_client(answer, reason)
    with pytest.raises(type(expected)) as caught, ExitStack() as resources:
        await lookups.grammar(SCHEMA, resources)
    assert (str(caught.value), vars(caught.value).get("field")) == (str(expected), vars(expected).get("field"))
    assert engine.open == []


@run_async
async def test_a_grammar_is_kept_until_the_call_ends() -> None:
    lookups, engine, _ = make_client(Acquired(7))
    with ExitStack() as resources:
        assert await lookups.grammar(SCHEMA, resources) == 7
        assert engine.open == [SCHEMA]
    assert engine.open == []


def options(store: Path | None, length: int, **environ: str) -> AdapterStoreOptions | None:
    """What the engine process gets, for sequences of up to `length` tokens."""
    path = {"PREFIX_STORE_PATH": str(store)} if store else {}
    parsed = config.parse([], {"MODEL_NAME": "m", **path, **environ}, "tgis serve")
    return limits.adapter_store_options(parsed, RequestLimits(length, 1, include_stop_sequence=True))


def test_soft_prompts_take_up_to_half_of_a_sequence_by_default(tmp_path: Path) -> None:
    assert options(None, 101, MAX_PROMPT_PREFIX_LENGTH="200") is None
    assert options(tmp_path, 101) == AdapterStoreOptions(str(tmp_path), 512 << 20, 51)
    assert options(tmp_path, 101, MAX_PROMPT_PREFIX_LENGTH="100", PROMPT_CACHE_SIZE_MB="3") == AdapterStoreOptions(
        str(tmp_path), 3 << 20, 100
    )
    with pytest.raises(OptionError, match="MAX_PROMPT_PREFIX_LENGTH=101 must be at most 100"):
        options(tmp_path, 101, MAX_PROMPT_PREFIX_LENGTH="101")


def test_lora_modules_are_directories_or_in_the_hub_cache(tmp_path: Path) -> None:
    commit = "0123456789" * 4
    refs, cached = (tmp_path / "models--org--sql" / name for name in ("refs", f"snapshots/{commit}"))
    refs.mkdir(parents=True)
    (refs / "main").write_text(commit)
    for directory in (cached, tmp_path / "here"):
        directory.mkdir(parents=True)
        (directory / "adapter_config.json").write_text("{}")
    found = options(None, 101, LORA_MODULES=f"a={tmp_path}/here b=org/sql", HF_HUB_CACHE=str(tmp_path))
    modules = {"a": str(tmp_path / "here"), "b": str(cached)}
    assert found == AdapterStoreOptions(None, 512 << 20, 51, modules)
    with pytest.raises(StartError, match=r"LORA_MODULES: a: .* has no adapter_config\.json"):
        options(None, 101, LORA_MODULES=f"a={tmp_path}")
    with pytest.raises(StartError, match="LORA_MODULES: a: model 'org/none' not found"):
        options(None, 101, LORA_MODULES="a=org/none", HF_HUB_CACHE=str(tmp_path))
