"""tgis.frontend.lookups: what a call that names an adapter or a grammar gets, without an engine."""

from contextlib import ExitStack
from typing import Any

import msgspec
import pytest
from harness import run_async
from scraped_metrics import make_metrics, value

from tgis.errors import GrammarError, InvalidRequest, Overloaded, RequestError
from tgis.frontend.lookups import Lookups
from tgis.ipc.lookups import Acquired, AdapterProblem, AdapterRef, GrammarKind, GrammarSpec
from tgis.structured_output.lark import to_lark

REF, SCHEMA = AdapterRef("a/b", 5, 2, 7, 3, 16), GrammarSpec(GrammarKind.JSON_SCHEMA, "{}")


class Engine:
    """Gives every lookup the same answer; `lookups` ask it."""

    def __init__(self, answer: Acquired | None, reason: str | None = None) -> None:
        self.answer, self.open, self.metrics = answer, list[str | GrammarSpec](), make_metrics()
        client: Any = self
        self.lookups = Lookups(client, self.metrics, why_no_adapters=reason, why_no_grammars=reason)

    async def acquire(self, target: str | GrammarSpec, timeout: float, resources: ExitStack) -> Acquired | None:
        assert timeout == (5 if isinstance(target, str) else 10)
        self.open.append(target)
        resources.callback(self.open.remove, target)
        return self.answer

    @property
    def failures_and_loads(self) -> list[float]:
        return [value(self.metrics, f"tgi_prompt_load_{name}") for name in ("failure", "duration_count")]


@run_async
async def test_what_is_found_is_kept_until_the_call_ends() -> None:
    for loaded in (True, False):
        engine = Engine(Acquired(7, adapter=REF, loaded=loaded))
        with ExitStack() as resources:
            assert await engine.lookups.adapter(("adapter_id", "a/b"), resources) == REF
            assert await engine.lookups.grammar(SCHEMA, resources) == 7
            adapter, schema = engine.open
            assert (adapter, schema) == ("a/b", msgspec.structs.replace(SCHEMA, lark=to_lark(SCHEMA)))
        assert (engine.open, engine.failures_and_loads) == ([], [0, loaded])
        assert value(engine.metrics, "tgi_prompt_load_duration_sum") < 60


NO_STORE, PREFIX = "FakeEngine takes no soft prompts", "can't retrieve prompt prefix with id"
NOT_FOUND, UNSUPPORTED = Acquired(1, "gone", AdapterProblem.NOT_FOUND), AdapterProblem.UNSUPPORTED
CHARACTERS = "must contain only alphanumeric, _ and - and /"


@pytest.mark.parametrize(
    ("named", "answer", "reason", "text"),
    [
        (("prefix_id", "x"), None, NO_STORE, f"prefix_id supplied but {NO_STORE}"),
        (("prefix_id", "x"), None, None, f"{PREFIX} 'x': it could not be loaded in time"),
        (("prefix_id", "x\n" * 50), None, None, f"{PREFIX} '{'x?' * 50}': it could not be loaded in time"),
        (("prefix_id", "x\n" * 60), None, None, f"{PREFIX} '{'x?' * 50}...': it could not be loaded in time"),
        (("prefix_id", "x"), Acquired(1, "-", AdapterProblem.BAD_ID), None, f"{PREFIX} 'x': -"),
        (("prefix_id", "x"), NOT_FOUND, None, f"{PREFIX} 'x': prefix id \"x\" not found"),
        (("adapter_id", "x"), NOT_FOUND, None, "can't retrieve adapter with id 'x': gone"),
        (("adapter_id", "\n"), Acquired(1, "-", AdapterProblem.BAD_ID), None, f"Invalid adapter id '?', {CHARACTERS}"),
        (("prefix_id", "x"), Acquired(1, "LORA", UNSUPPORTED), None, "adapter type LORA is not currently supported"),
    ],
)
@run_async
async def test_errors_use_the_words_of_tgis(named: Any, answer: Any, reason: str | None, text: str) -> None:
    engine = Engine(answer, reason)
    with pytest.raises(InvalidRequest) as caught, ExitStack() as resources:
        await engine.lookups.adapter(named, resources)
    assert (str(caught.value), caught.value.field) == (text, named[0])
    assert (engine.open, engine.failures_and_loads) == ([], [1, 0])


LOGGED = "json_schema cannot be compiled"


@pytest.mark.parametrize(
    ("reason", "answer", "expected"),
    [
        (None, Acquired(7, "too deep"), InvalidRequest("json_schema", "json_schema: too deep", logged=LOGGED)),
        (None, None, Overloaded("no grammar was compiled within 10 s")),
        ("none here", None, InvalidRequest("json_schema", "json_schema: none here")),
    ],
)
@run_async
async def test_a_grammar_that_cannot_be_used(reason: str | None, answer: Any, expected: RequestError) -> None:
    engine = Engine(answer, reason)
    with pytest.raises(type(expected)) as caught, ExitStack() as resources:
        await engine.lookups.grammar(SCHEMA, resources)
    assert (str(caught.value), vars(caught.value)) == (str(expected), vars(expected))
    assert engine.open == []


def test_the_middle_of_a_long_reason_is_left_out() -> None:
    reasons = {"x" * 200: "x" * 200, "a" * 140 + "x" * 6 + "b" * 55: "a" * 140 + " ... " + "b" * 55}
    assert {reason: str(GrammarError(reason)) for reason in reasons} == reasons


@run_async
async def test_a_schema_that_is_refused_does_not_reach_the_engine() -> None:
    engine = Engine(Acquired(7))
    with pytest.raises(InvalidRequest, match="json_schema: not JSON"), ExitStack() as resources:
        await engine.lookups.grammar(GrammarSpec(GrammarKind.JSON_SCHEMA, "{"), resources)
    assert engine.open == []


@run_async
async def test_a_schema_that_need_not_be_exact_is_tried_again_with_less() -> None:
    engine, schema = Engine(Acquired(7)), '{"type": "integer", "multipleOf": 123457}'
    with ExitStack() as resources:
        with pytest.raises(InvalidRequest, match="multipleOf"):
            await engine.lookups.grammar(GrammarSpec(GrammarKind.JSON_SCHEMA, schema), resources)
        assert await engine.lookups.grammar(GrammarSpec(GrammarKind.JSON_SCHEMA, schema, exact=False), resources) == 7
        tools = GrammarSpec(GrammarKind.TOOLS, f"start: tool\ntool: %json {schema}", inexact_lines=(2,))
        assert await engine.lookups.grammar(tools, resources) == 7
        assert not any("multipleOf" in found.lark for found in engine.open if isinstance(found, GrammarSpec))
