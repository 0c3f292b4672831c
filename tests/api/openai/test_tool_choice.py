"""tgis.api.openai.tool_choice: what its grammars let through, read by the parser of tool calls."""

import json
import random
from typing import Any

import jsonschema
import msgspec
import pytest
from grammar_walks import EOS, token_table, walk
from tables import table

from benchmarks.structured_output.features import BOOLEAN, INTEGER, NODE, PERSON, closed
from tgis.api.openai.bodies import ChatCompletionRequest
from tgis.api.openai.tool_calls import (
    HERMES,
    LLAMA3,
    MISTRAL,
    MISTRAL_ARGS,
    ToolCallParser,
    ToolFormat,
    complete_calls,
)
from tgis.api.openai.tool_choice import ToolChoice, ToolGrammar
from tgis.errors import GrammarError, InvalidRequest
from tgis.structured_output.compiler import compile_grammar
from tgis.structured_output.matcher import GrammarMatcher

FORMATS = {"hermes": HERMES, "mistral": MISTRAL, "mistral-args": MISTRAL_ARGS, "llama3": LLAMA3}
SPECIAL = {text: 257 + index for index, text in enumerate(("[TOOL_CALLS]", "[ARGS]", "<tool_call>", "<|python_tag|>"))}
TABLE = token_table([*(bytes([byte]) for byte in range(256)), *[b""] * len(SPECIAL)])
BOOK = closed(
    seats={"type": "integer", "minimum": 1, "maximum": 9},
    window=BOOLEAN,
    seat={"type": "string", "pattern": "^[A-F][1-9]$"},
)
SCHEMAS: dict[str, Any] = {"book": BOOK, "book_2": PERSON, "walk.to-node": NODE, "now": None}


def request(**fields: Any) -> ChatCompletionRequest:
    tools = [{"function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()]
    body = {"messages": [{"role": "user", "content": "x"}], "tools": tools} | fields
    return msgspec.convert(body, ChatCompletionRequest)


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def compiled(form: ToolFormat, body: ChatCompletionRequest, *, special: bool = False) -> GrammarMatcher:
    spec = ToolGrammar(form, SPECIAL.get if special else lambda _: None).spec(ToolChoice.of(body))
    return compile_grammar(spec, TABLE)


def text_of(tokens: list[int]) -> str:
    marks = {token: text.encode() for text, token in SPECIAL.items()}
    return b"".join(marks.get(token) or bytes([token - 1]) for token in tokens).decode()


def accepts(matcher: GrammarMatcher, text: str, *, special: bool = False) -> bool | int:
    """Whether it may end there; if it is no beginning of an output, where the first wrong character is."""
    tokens = [byte + 1 for byte in text.encode()]
    if special:
        parts = text.split("[TOOL_CALLS]")
        tokens = [byte + 1 for byte in parts[0].encode()]
        for part in parts[1:]:
            tokens += [SPECIAL["[TOOL_CALLS]"], *(byte + 1 for byte in part.encode())]
    for at, token in enumerate(tokens):
        if token not in matcher.allowed_ids(tokens[:at]):
            return at
    return EOS in matcher.allowed_ids(tokens)


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("choice", ["required", named("book"), "now"])
@pytest.mark.parametrize("form", FORMATS)
def test_outputs_are_calls_with_arguments_that_match(form: str, choice: Any, special: bool) -> None:
    matcher = compiled(FORMATS[form], request(tool_choice=choice), special=special)
    rng, found, counts = random.Random(7), set(), set()
    for _ in range(12):
        tokens, ended = walk(matcher, rng, 2000, eager=0.4)
        parser = ToolCallParser(FORMATS[form], SCHEMAS)
        text, calls = complete_calls([*parser.add(text_of(tokens)), *parser.finish()])
        assert text == ""
        for name, arguments in calls if ended else calls[:-1]:
            schema = SCHEMAS[name] or {"type": "object", "maxProperties": 0}
            jsonschema.validate(json.loads(arguments), schema)
        if ended:
            found |= {name for name, _ in calls}
            counts.add(len(calls))
    if choice == "required":
        assert found == set(SCHEMAS)
        assert counts == {1} if form == "llama3" else counts > {1}
    else:
        assert (found, counts) == ({"now" if choice == "now" else "book"}, {1})


@pytest.mark.parametrize("form", FORMATS)
def test_one_call_if_only_one_is_wanted(form: str) -> None:
    matcher = compiled(FORMATS[form], request(tool_choice="required", parallel_tool_calls=False))
    for seed in range(4):
        tokens, ended = walk(matcher, random.Random(seed), 2000)
        parser = ToolCallParser(FORMATS[form], SCHEMAS)
        parser.add(text_of(tokens))
        assert (parser.num_calls, ended) == (1, True)


STRICT = [
    {"function": {"name": "book", "strict": True, "parameters": closed(seats=INTEGER)}},
    {"function": {"name": "free", "parameters": closed(seats=INTEGER)}},
]
BOOK_1 = '{"name": "book", "arguments": {"seats": 1}}'


@table("tool_calls", "auto")
def test_the_model_may_call_or_not(row: dict[str, Any]) -> None:
    allowed = row["allowed"]
    expected = len(allowed) if isinstance(allowed, str) else allowed
    assert accepts(compiled(FORMATS[row["format"]], request(tools=STRICT)), row["text"]) == expected


def test_a_mark_that_is_a_special_token_is_nothing_else() -> None:
    matcher = compiled(MISTRAL, request(tools=STRICT), special=True)
    assert accepts(matcher, f"Well.[TOOL_CALLS] [{BOOK_1}]", special=True) is True
    assert accepts(matcher, "Well.[TOOL_CALLS", special=True) is True
    assert accepts(matcher, "Well.[TOOL_CALLS]") == len("Well.[TOOL_CALLS")


MANY = [{"function": {"name": "now"}}] * 1024


@pytest.mark.parametrize(
    "fields", [{}, {"tool_choice": "auto"}, {"tool_choice": "none"}, {"tools": []}, {"tools": MANY}]
)
def test_no_grammar_where_nothing_is_promised(fields: dict[str, Any]) -> None:
    assert not ToolChoice.of(request(**fields)).needs_grammar


def test_too_many_tools() -> None:
    with pytest.raises(InvalidRequest, match="tools must be at most 1024"):
        compiled(HERMES, request(tools=[*MANY, MANY[0]]))


def test_words_in_a_schema_mean_nothing() -> None:
    """Neither EBNF nor Lark, and no brackets to be counted."""
    description = 'root ::= %json {99999} ((((( %llguidance "\\" \n /x/'
    tools = [{"function": {"name": "book", "parameters": closed(seats=INTEGER) | {"description": description}}}]
    matcher = compiled(HERMES, request(tools=tools, tool_choice="required"))
    assert accepts(matcher, f"<tool_call>\n{BOOK_1}\n</tool_call>") is True


@pytest.mark.parametrize("strict", [False, True])
def test_one_of_is_exact_in_strict_functions(strict: bool) -> None:
    schema = closed(seats={"oneOf": [INTEGER, {"type": "number"}]})
    tools = [{"function": {"name": "book", "parameters": schema, "strict": strict}}]
    body = request(tools=tools, tool_choice="required")
    if strict:
        with pytest.raises(GrammarError, match=r"^oneOf at #/properties/seats: .* in tools\[0\].function.parameters$"):
            compiled(HERMES, body)
    else:
        assert accepts(compiled(HERMES, body), f"<tool_call>\n{BOOK_1}\n</tool_call>") is True
