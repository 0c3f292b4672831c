"""tgis.api.openai.tool_calls and tool_formats: outputs as the models' templates and cards show them, however they are
cut; probing a template finds its format.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from chat_templates import load_template, write_template
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import table

from demo.fake_model import make_fake_model
from tgis.api.openai import tool_calls
from tgis.api.openai.bodies import ChatCompletionRequest
from tgis.api.openai.chat import Choice
from tgis.api.openai.logprobs import TokenTexts
from tgis.api.openai.reasoning import OutputParser
from tgis.api.openai.tool_calls import Piece, ToolCallParser, ToolCallPiece, complete_calls
from tgis.api.openai.tool_formats import COMMAND_R, HERMES, MISTRAL_ARGS, QWEN3_CODER, TOOL_FORMATS, ToolFormat
from tgis.frontend.detokenizer import TokenDecoder
from tgis.frontend.output import RequestOutput
from tgis.frontend.tokenizer import Tokenizer
from tgis.ipc.request import StopReason


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> TokenDecoder:
    tokenizer = Tokenizer.load(make_fake_model(tmp_path_factory.mktemp("bytes")), workers=1)
    return TokenDecoder(tokenizer, (), encoder_decoder=False, output_special_tokens=True)


TEXT: Any = {"type": "string"}
TYPES: Any = {"a": {"type": "integer"}, "b": {"anyOf": [TEXT, {"type": "null"}]}, "d": {"anyOf": True, "type": [[]]}}
TYPES |= {"e": True, "f": TEXT, "g": {"oneOf": [{"type": ["string"]}]}}
TOOLS: dict[str, Any] = {"w": {}, "x": None, "now": {"type": "object"}, "get-w": {}, "function": None}  # offered
TOOLS["s"] = {"properties": TYPES}
PARIS, ROME = {"city": "Paris", "unit": "c"}, {"city": 'R{o}"m\\e', "days": [1, {"a": None}]}


def call(name: str, arguments: Any, key: str = "arguments") -> str:
    return json.dumps({"name": name, key: arguments})


FORMATS = {name: form for name, (form, *_) in TOOL_FORMATS.items()}
FORMATS |= {"mistral-args": MISTRAL_ARGS, "command_r": COMMAND_R}
FORMATS = {name: form for name, form in FORMATS.items() if form not in [*FORMATS.values()][: [*FORMATS].index(name)]}


def parse(tool_format: ToolFormat, parts: list[str]) -> list[Piece]:
    parser = ToolCallParser(tool_format, TOOLS)
    return [piece for part in parts for piece in parser.add(part)] + parser.finish()


def read(tool_format: ToolFormat, parts: list[str]) -> tuple[str, list[tuple[str, Any]]]:
    """The text, and the calls with their arguments."""
    text, calls = complete_calls(parse(tool_format, parts))
    return text, [(name, json.loads(arguments)) for name, arguments in calls]


def cut(output: str, size: int) -> list[str]:
    return [output[at : at + size] for at in range(0, len(output), size)]


@table("tool_calls", "outputs")
@settings(max_examples=10)
@given(data=st.data())
def test_outputs_in_any_parts(row: dict[str, Any], data: st.DataObject) -> None:
    output = row["output"]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(output)), max_size=8)))
    parts = [output[start:end] for start, end in zip([0, *cuts], [*cuts, len(output)], strict=True)]
    calls = [(name, json.loads(arguments)) for name, arguments in row["calls"]]
    for split in ([output], list(output), parts):
        assert read(FORMATS[row["format"]], split) == (row["text"], calls)
        pieces = parse(FORMATS[row["format"]], split)
        named = [piece for piece in pieces if not isinstance(piece, str) and piece.name is not None]
        assert [piece.index for piece in named] == list(range(len(calls)))


LAYOUTS = ["[ARGS]", "[CALL_ID]", "<function=w>", "<parameter=a>\n", "\n</parameter>", "</function>", "w(", "a=", "'"]
LAYOUTS += ["w\n<arg_key>a</arg_key><arg_value>", "</arg_value>", "<｜tool▁call▁begin｜>w<｜tool▁sep｜>", ")"]
LAYOUTS += ["w<|message|>"]
JSON = ['{"name": "w", "arguments": ', '"parameters": ', '{"name": "', "{}", '{"a": "}"}', "}"]
JSON += ['"', "\\ud800", ", ", "\\q", "\n", "\u0000", "null"]
ARGUMENTS = st.sampled_from([{}, PARIS, ROME, None, 1, "{}", "\ud800"])
FRAGMENTS = st.one_of(
    st.sampled_from([*LAYOUTS, *JSON, "w", "rm"]),
    st.builds(call, st.sampled_from(["w", "x", "rm", "w\n"]), ARGUMENTS),
    st.text('<tool_call>/|python_tag[]TOOL_CALLS{}",:;name \n1\\', max_size=8),
)


@pytest.mark.parametrize("tool_format", FORMATS.values(), ids=FORMATS)
@settings(max_examples=50)
@given(data=st.data())
def test_any_output_is_text_and_calls_of_offered_tools(tool_format: ToolFormat, data: st.DataObject) -> None:
    """However it is cut; without a call, the text is the output."""
    marks = st.sampled_from([tool_format.start, tool_format.other_start, tool_format.end])
    output = data.draw(st.lists(marks | FRAGMENTS, max_size=12).map("".join))
    text, calls = complete_calls(parse(tool_format, [output]))
    assert {name for name, _ in calls} <= TOOLS.keys()
    assert calls or text == output
    "".join([text, *(arguments for _, arguments in calls)]).encode()  # raises for a lone surrogate
    cuts = sorted(data.draw(st.lists(st.integers(0, len(output)), max_size=8)))
    parts = [output[start:end] for start, end in zip([0, *cuts], [*cuts, len(output)], strict=True)]
    assert complete_calls(parse(tool_format, parts)) == (text, calls)
    assert complete_calls(parse(tool_format, list(output))) == (text, calls)


@pytest.mark.parametrize("parts", [1, 2, 5, 999])
def test_the_last_chunk_of_a_stream_says_that_a_tool_is_called(decoder: TokenDecoder, parts: int) -> None:
    """However many tokens a message has: one may have them all, if the reader was behind."""
    output = f"I look.\n<tool_call>\n{call('w', PARIS)}\n</tool_call>"
    size = -(-len(output) // parts)
    body = ChatCompletionRequest(messages=[])
    choice = Choice(0, body, OutputParser(ToolCallParser(HERMES, TOOLS)), TokenTexts(decoder))
    messages = [
        RequestOutput(text=output[at : at + size], generated_token_count=1) for at in range(0, len(output), size)
    ]
    messages[-1] = replace(messages[-1], stop_reason=StopReason.EOS_TOKEN)
    chunks = [chunk for message in messages for chunk in choice.chunks(message)]
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["tool_calls"]
    calls = [piece for chunk in chunks for piece in chunk.delta.tool_calls or ()]
    assert json.loads("".join(piece.function.arguments for piece in calls)) == PARIS
    assert [(piece.function.name, piece.type) for piece in calls] == [("w", "function")] + [(None, None)] * (
        len(calls) - 1
    )
    assert [len(piece.id or "") for piece in calls] == [9] + [0] * (len(calls) - 1)  # as Mistral's templates accept it
    assert [chunk.delta.role for chunk in chunks] == ["assistant"] + [None] * (len(chunks) - 1)
    assert "".join(chunk.delta.content or "" for chunk in chunks) == "I look."


def test_arguments_are_streamed_as_they_come() -> None:
    parser = ToolCallParser(HERMES, TOOLS)
    assert parser.add('<tool_call>{"name": "w", "arguments": ') == []
    assert parser.add('{"city"') == [ToolCallPiece(0, "", "w"), ToolCallPiece(0, '{"city"')]
    assert parser.add(': "Pa') == [ToolCallPiece(0, ': "Pa')]
    assert parser.add('ris"}}</tool_call>') == [ToolCallPiece(0, 'ris"}')]


# Repeated n times: marks without a call, calls that are none, in each other, and what may stand before a call.
HOSTILE = ["{mark}", "{mark}x", "{mark}{{", "{mark}{{}}", "{mark}{{{{x}} ", "{mark} [ ", " ", "[", "x"]
HOSTILE += ['{{"name": "rm"', "w(a='", "<function=w><parameter=a>", "w<arg_key>a</arg_key>"]


def num_lines(tool_format: ToolFormat, output: str, size: int) -> int:
    """The lines that the parser executes, one or more for each character that Python code visits."""
    lines = 0

    def count(frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return count if frame.f_code.co_filename == tool_calls.__file__ else None

    before = sys.gettrace()
    sys.settrace(count)
    try:
        text, _ = complete_calls(parse(tool_format, cut(output, size)))
    finally:
        sys.settrace(before)
    assert text == output
    return lines


@pytest.mark.parametrize("size", [1, 10**6])
@pytest.mark.parametrize("part", HOSTILE)
@pytest.mark.parametrize("tool_format", FORMATS.values(), ids=FORMATS)
def test_twice_the_output_takes_twice_the_work(tool_format: ToolFormat, part: str, size: int) -> None:
    part = part.format(mark=tool_format.start)
    outputs = (tool_format.start + part * n + "}" * n for n in (50, 100))
    once, twice = (num_lines(tool_format, output, size) for output in outputs)
    assert twice <= 2.2 * once


def test_deep_values_are_arguments_or_no_call() -> None:
    """Near Python's limit, JSON that can be read may be too deep to be written."""
    for depth in range(800, 1000):
        value = "[" * depth + "]" * depth
        marked = f"<tool_call><function=w><parameter=a>{value}</parameter></function></tool_call>"
        for form, output in ((QWEN3_CODER, marked), (FORMATS["olmo3"], f"<function_calls>w(a={value})")):
            text, calls = complete_calls(parse(form, [output]))
            assert (text == output) != bool(calls)


@pytest.mark.parametrize("parts", [1, 100])
def test_brackets_without_end_are_text(parts: int) -> None:
    output = '<tool_call>{"arguments": ' + "[" * 100_000 + "}"
    assert complete_calls(parse(HERMES, cut(output, -(-len(output) // parts)))) == (output, [])


CALLS = [
    ("w", {"city": "Paris", "days": 2}),
    ("x", {"text": "a > b\n\"c\", 'd'", "list": [1, {"a": None}], "yes": True}),
]
USER = {"role": "user", "content": "x"}


def message(calls: list[tuple[str, Any]]) -> dict[str, Any]:
    functions = [{"name": name, "arguments": arguments} for name, arguments in calls]
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": function} for function in functions]}


def write(directory: Path, row: dict[str, Any]) -> None:
    make_fake_model(directory)
    calls = "{% set calls = m.tool_calls | map(attribute='function') | list %}" + row.get("calls", "")
    answer = row["begin"] + calls + row.get("end", "")
    turns = f"{{% for m in messages %}}{{% if m.role == 'user' %}}x{{% else %}}{answer}{{% endif %}}{{% endfor %}}"
    head = f"{{% if tools %}}{row.get('tools', '')}{{% endif %}}"
    write_template(directory, f"{head}{turns}{{% if add_generation_prompt %}}{row['begin']}{{% endif %}}")


@table("tool_formats", "templates")
def test_formats_read_what_their_templates_write(row: dict[str, Any], tmp_path: Path, request: Any) -> None:
    form, calls = FORMATS[request.node.callspec.id], CALLS
    write(tmp_path, row)
    template = load_template(tmp_path)
    assert template.formats.tools == form
    if (output := row.get("output")) is None:
        calls = CALLS[: 2 if form.between is not None or form.arguments != "{}" else 1]
        messages = [USER, message(calls)]
        prompt, end = template.render([USER]), row["end"].strip()
        output = template.render(messages, add_generation_prompt=False).removeprefix(prompt).rpartition(end)[0]
    for size in (1, 2, 3, 7, len(output)):
        assert read(form, cut(output, size)) == (row.get("text", ""), calls)


def test_names_of_vllm_go_first(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, {"begin": "a", "calls": "{% for c in calls %}<tool_call>{{ c | tojson }}</tool_call>{% endfor %}"})
    assert load_template(tmp_path).formats.tools == FORMATS["hermes"]
    assert load_template(tmp_path, "olmo3").formats.tools == FORMATS["olmo3"]
    assert load_template(tmp_path, "x").formats.tools == FORMATS["hermes"]
    assert "unknown parser x: the chat template is probed; known are hermes, mistral, " in caplog.text
