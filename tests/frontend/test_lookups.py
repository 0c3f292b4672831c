"""tgis.frontend.lookups: what a call that names an adapter or a grammar gets, without an engine."""

from contextlib import ExitStack
from typing import Any

import pytest
from harness import run_async
from scraped_metrics import make_metrics, value

from tgis.errors import InvalidRequest, Overloaded, RequestError
from tgis.frontend.lookups import Lookups
from tgis.frontend.metrics import Metrics
from tgis.ipc.lookups import Acquired, AdapterProblem, AdapterRef, GrammarKind, GrammarSpec

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
P = AdapterProblem


@pytest.mark.parametrize(
    ("field", "answer", "reason", "text"),
    [
        ("prefix_id", None, NO_STORE, f"prefix_id supplied but {NO_STORE}"),
        ("prefix_id", None, None, "can't retrieve prompt prefix with id 'x': it could not be loaded in time"),
        (
            "prefix_id",
            Acquired(1, "-", P.NOT_FOUND),
            None,
            "can't retrieve prompt prefix with id 'x': prefix id \"x\" not found",
        ),
        ("adapter_id", Acquired(1, "gone", P.NOT_FOUND), None, "can't retrieve adapter with id 'x': gone"),
        (
            "adapter_id",
            Acquired(1, "-", P.BAD_ID),
            None,
            "Invalid adapter id 'x', must contain only alphanumeric, _ and - and /",
        ),
        ("prefix_id", Acquired(1, "LORA", P.UNSUPPORTED), None, "adapter type LORA is not currently supported"),
        ("adapter_id", Acquired(1, "damaged", P.BROKEN), None, "can't retrieve adapter with id 'x': damaged"),
    ],
)
@run_async
async def test_errors_use_the_words_of_tgis(field: str, answer: Answer, reason: str | None, text: str) -> None:
    adapters, engine, metrics = make_client(answer, reason)
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
