"""tgis.api.openai.tool_choice: what its grammars let through, read by the parser of tool calls."""

import json
import random
from typing import Any

import jsonschema
import msgspec
import pytest
from grammar_walks import accepts, byte_table, walk
from tables import table

from benchmarks.structured_output.features import BOOLEAN, INTEGER, NODE, PERSON, closed
from tgis.api.openai.bodies import ChatCompletionRequest
from tgis.api.openai.grammars import GrammarMarks
from tgis.api.openai.tool_calls import ToolCallParser, complete_calls
from tgis.api.openai.tool_choice import ToolChoice, ToolGrammar
from tgis.api.openai.tool_formats import HERMES, MISTRAL, MISTRAL_ARGS, TOOL_FORMATS, ToolFormat
from tgis.errors import GrammarError, InvalidRequest
from tgis.ipc.lookups import GrammarKind, GrammarSpec
from tgis.structured_output.compiler import compile_grammar
from tgis.structured_output.matcher import GrammarMatcher

NAMES = "hermes", "mistral", "llama3_json", "qwen3_coder", "pythonic", "granite", "deepseek_v31"
FORMATS = {name: TOOL_FORMATS[name][0] for name in NAMES} | {"mistral-args": MISTRAL_ARGS}
MARKS = "[TOOL_CALLS]", "[ARGS]", "<tool_call>", "<|python_tag|>", "</parameter>", "<|channel|>"
SPECIAL = {text: 257 + index for index, text in enumerate(MARKS)}
TABLE = byte_table([b""] * len(SPECIAL))
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


def compiled(
    form: ToolFormat, body: ChatCompletionRequest, answer: GrammarSpec | None = None, *, special: bool = False
) -> GrammarMatcher:
    spec = ToolGrammar(form, GrammarMarks(SPECIAL.get if special else lambda _: None)).spec(ToolChoice.of(body), answer)
    try:
        return compile_grammar(spec, TABLE)
    except GrammarError:
        if spec.is_exact:
            raise
        return compile_grammar(msgspec.structs.replace(spec, rough=True), TABLE)


def text_of(tokens: list[int]) -> str:
    marks = {token: text.encode() for text, token in SPECIAL.items()}
    return b"".join(marks.get(token) or bytes([token - 1]) for token in tokens).decode()


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "book"}}, "now"])
@pytest.mark.parametrize("form", FORMATS)
def test_outputs_are_calls_with_arguments_that_match(form: str, choice: Any, special: bool) -> None:
    matcher = compiled(FORMATS[form], request(tool_choice=choice), special=special)
    rng, found, counts = random.Random(7), set(), set()
    for _ in range(12):
        tokens, ended = walk(matcher, rng, 2000, eager=0.4)
        spelled = [mark for mark, token in SPECIAL.items() if text_of(tokens).count(mark) > tokens.count(token)]
        assert not special or not spelled
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
        assert counts == {1} if FORMATS[form].between is None else counts > {1}
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


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("form", FORMATS)
def test_a_call_or_an_answer_that_matches(form: str, strict: bool, choice: str) -> None:
    tools = [{"function": {"name": "book", "parameters": BOOK, "strict": strict}}]
    answer = GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(PERSON, indent=1))
    matcher = compiled(FORMATS[form], request(tools=tools, tool_choice=choice), answer)
    rng, kinds = random.Random(3), set()
    for _ in range(12):
        tokens, ended = walk(matcher, rng, 2000, eager=0.4)
        parser = ToolCallParser(FORMATS[form], {"book": BOOK})
        text, calls = complete_calls([*parser.add(text_of(tokens)), *parser.finish()])
        kinds.add("call" if calls else "answer")
        for _, arguments in calls if ended else ():
            jsonschema.validate(json.loads(arguments), BOOK if strict or choice == "required" else {"type": "object"})
        if ended and not calls:
            jsonschema.validate(json.loads(text), PERSON)
    with pytest.raises(GrammarError, match=r"unsupported keywords.* in response_format$"):
        compiled(FORMATS[form], request(tools=tools), GrammarSpec(GrammarKind.JSON_SCHEMA, '{"not": {}}'))
    assert kinds == ({"call"} if choice == "required" else {"call", "answer"})


STRING = {"type": "string"}
ROW = {"type": "string", "enum": ["A", "B"]}
STRICT = [
    {"function": {"name": "book", "strict": True, "parameters": closed(seats=INTEGER)}},
    {"function": {"name": "free", "parameters": closed(seats=INTEGER)}},
    {"function": {"name": "seat", "strict": True, "parameters": closed(["n"], n=INTEGER, text=STRING, row=ROW)}},
]
BOOK_1 = '{"name": "book", "arguments": {"seats": 1}}'


@table("tool_calls", "auto")
def test_the_model_may_call_or_not(row: dict[str, Any]) -> None:
    allowed = row["allowed"]
    expected = len(allowed) if isinstance(allowed, str) else allowed
    assert accepts(compiled(TOOL_FORMATS[row["format"]][0], request(tools=STRICT)), row["text"]) == expected


@table("tool_calls", "parameters")
def test_parameters_that_marks_cannot_hold_to_their_schema_are_json(row: dict[str, Any]) -> None:
    tools = [{"function": {"name": "f", "parameters": {"type": "object"} | row["schema"]}}]
    body = request(tools=tools, tool_choice="f")
    if "error" in row:
        with pytest.raises(GrammarError, match=row["error"]):
            compiled(FORMATS["qwen3_coder"], body)
        return
    for output in row["outputs"]:
        matcher = compiled(FORMATS["qwen3_coder"], body)
        assert (accepts(matcher, f"<tool_call>\n{output}\n</tool_call>") is True) == (output == row["outputs"][0])


def test_a_mark_that_is_a_special_token_is_nothing_else() -> None:
    matcher = compiled(MISTRAL, request(tools=STRICT), special=True)
    assert accepts(matcher, f"Well.[TOOL_CALLS] [{BOOK_1}]", SPECIAL) is True
    assert accepts(matcher, "Well.[TOOL_CALLS", SPECIAL) is True
    assert accepts(matcher, "Well.[TOOL_CALLS]") == len("Well.[TOOL_CALLS")


@table("tool_calls", "special marks")
def test_marks_with_special_tokens_in_them(row: dict[str, Any]) -> None:
    matcher = compiled(TOOL_FORMATS[row["format"]][0], request(tools=STRICT), special=True)
    assert accepts(matcher, row["text"], SPECIAL) is True


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


@table("tool_calls", "enforced in part")
def test_what_cannot_be_enforced_is_left_out_unless_strict(
    row: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Beside a strict function, whose schema is enforced."""
    book: dict[str, Any] = {"name": "book", "parameters": closed(seats=row["schema"])}
    tools = [{"function": book}, {"function": {"name": "free", "parameters": closed(seats=BOOLEAN), "strict": True}}]
    matcher = compiled(HERMES, request(tools=tools, tool_choice="required"))
    (message,) = caplog.messages
    assert message.startswith("a JSON schema without strict is enforced in part")
    for call in (BOOK_1, BOOK_1.replace("1}", "null}"), BOOK_1.replace("book", "free")):
        assert (accepts(matcher, f"<tool_call>\n{call}\n</tool_call>") is True) == (call == BOOK_1)
    compiled(HERMES, request(tools=tools), GrammarSpec(GrammarKind.JSON_SCHEMA, '{"not": {}}', exact=False))
    book["strict"] = True
    with pytest.raises(GrammarError, match=rf"{row['problem']}.* in tools\[0\].function.parameters$"):
        compiled(HERMES, request(tools=tools, tool_choice="required"))
