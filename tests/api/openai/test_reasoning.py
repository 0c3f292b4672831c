"""tgis.api.openai.reasoning: thoughts in outputs, however they are cut; in templates, in grammars and in answers."""

import json
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from chat_templates import TEMPLATES, load_template, write_template
from grammar_walks import accepts, byte_table
from harness import run_async
from hypothesis import given
from hypothesis import strategies as st
from scripted_api import ask, output
from tables import table

from demo.fake_model import make_fake_model
from tgis.api.openai.bodies import ChatCompletionRequest
from tgis.api.openai.grammars import GrammarMarks
from tgis.api.openai.reasoning import COMMAND, HARMONY, REASONING_FORMATS, THINK, OutputParser, ReasoningParser, Thought
from tgis.api.openai.tool_calls import ToolCallParser, complete_calls
from tgis.api.openai.tool_choice import ToolChoice, ToolGrammar
from tgis.api.openai.tool_formats import HARMONY as HARMONY_CALLS
from tgis.api.openai.tool_formats import HERMES, TOOL_FORMATS
from tgis.frontend.tokenizer import Tokenizer
from tgis.ipc.lookups import GrammarKind, GrammarSpec
from tgis.structured_output.compiler import compile_grammar

CHAT = "/v1/chat/completions"
FORMATS = list(dict.fromkeys(REASONING_FORMATS.values()))
CALL = '<tool_call>\n{"name": "w", "arguments": {"a": 1}}\n</tool_call>'


def parsed(parser: OutputParser, parts: list[str]) -> tuple[str, str, list[tuple[str, str]]]:
    """The thought, the text and the calls."""
    pieces = [piece for part in parts for piece in parser.add(part, ended=False)] + parser.add("", ended=True)
    thought = "".join(piece.text for piece in pieces if isinstance(piece, Thought))
    return thought, *complete_calls(piece for piece in pieces if not isinstance(piece, Thought))


@table("tool_formats", "reasoning")
def test_thoughts_in_every_cut(row: dict[str, Any]) -> None:
    text, form, tools = row["output"], REASONING_FORMATS[row["format"]], TOOL_FORMATS[row.get("tools", "hermes")][0]
    for size in range(1, len(text) + 1):
        parser = OutputParser(ToolCallParser(tools, {"w": None}), ReasoningParser(form, row["prompt"]))
        parts = [text[at : at + size] for at in range(0, len(text), size)]
        assert parsed(parser, parts) == (row["thought"], row["text"], [*map(tuple, row.get("calls", ()))])


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.begin)
@given(data=st.data())
def test_any_output_is_the_same_in_any_parts(form: Any, data: st.DataObject) -> None:
    marks = [form.begin, form.end, *form.hidden, CALL, " ", "\n", "<", "x"]
    pieces = st.one_of(st.sampled_from(marks), st.text("".join(marks), max_size=5))
    text = data.draw(st.lists(pieces, max_size=9).map("".join))
    tools: dict[str, Any] = {"w": None}
    results = [
        parsed(OutputParser(ToolCallParser(HERMES, tools), ReasoningParser(form, "x")), parts)
        for parts in ([text], [*text], [text[at : at + 3] for at in range(0, len(text), 3)])
    ]
    assert results[0] == results[1] == results[2]
    marked = any(mark in text for mark in (form.begin, *form.hidden))
    assert marked or results[0] == ("", *parsed(OutputParser(ToolCallParser(HERMES, tools)), [text])[1:])


THINKS = (
    "{% for m in messages %}<{{ m.content }}>{% endfor %}{% if add_generation_prompt %}"
    "{% if thinking is true %}<think>{% elif enable_thinking is false %}<think></think>{% endif %}{% endif %}"
)


def test_templates_show_how_a_model_thinks(tmp_path: Path) -> None:
    make_fake_model(tmp_path)
    write_template(tmp_path, THINKS)
    assert load_template(tmp_path).formats.reasoning == THINK
    for template in TEMPLATES.values():
        write_template(tmp_path, template)
        assert load_template(tmp_path).formats.reasoning is None
        assert load_template(tmp_path, "hermes", "qwen3").formats.reasoning == THINK


MARKS = ["<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>", "[THINK]", "[/THINK]"]
SPECIAL = {mark: 257 + index for index, mark in enumerate(MARKS)}
TABLE = byte_table([b""] * len(SPECIAL))


def accepted(spec: GrammarSpec, text: str) -> bool | None:
    """Whether an output may be the text; None if it is no beginning of an output."""
    result = accepts(compile_grammar(spec, TABLE), text, SPECIAL)
    return result if isinstance(result, bool) else None


@pytest.mark.parametrize("kind", [GrammarKind.JSON_OBJECT, GrammarKind.CHOICE, GrammarKind.GRAMMAR])
@table("grammars", "thoughts")
def test_grammars_begin_behind_thoughts(row: dict[str, Any], kind: GrammarKind) -> None:
    rules = GrammarMarks(SPECIAL.get).after_thought(REASONING_FORMATS[row["form"]], row["prompt"], marks_answer=True)
    grammar = {GrammarKind.JSON_OBJECT: "", GrammarKind.CHOICE: "", GrammarKind.GRAMMAR: 'root ::= "{" "}"'}[kind]
    assert accepted(GrammarSpec(kind, grammar, ("{}", "[]"), after_thought=rules), row["text"]) is row["accepted"]


@table("grammars", "calls of harmony")
def test_calls_of_harmony_match_their_schemas(row: dict[str, Any]) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    tools = [{"function": {"name": "w", "parameters": schema, "strict": True}}]
    body = msgspec.convert({"messages": [], "tools": tools, **row["fields"]}, ChatCompletionRequest)
    marks = GrammarMarks(SPECIAL.get)
    spec = ToolGrammar(HARMONY_CALLS, marks, HARMONY.answer).spec(ToolChoice.of(body))
    rules = marks.after_thought(HARMONY, "x", marks_answer=False)
    assert accepted(msgspec.structs.replace(spec, after_thought=rules), row["text"]) is row["expected"]


@pytest.mark.parametrize("stream", [False, True])
@run_async
async def test_answers_have_thoughts_and_their_tokens(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many are counted outside the event loop."""
    threads, count, thought = set(), Tokenizer.count, "Hm " * 99 + CALL

    def counted(*args: Any) -> int:
        threads.add(threading.current_thread())
        return count(*args)

    monkeypatch.setattr(Tokenizer, "count", counted)
    texts = ["<thi", "nk>\nHm ", thought[3:], "</think>\n", "\n", CALL]
    outputs = [output(text, generated_token_count=100 * at) for at, text in enumerate(texts, 1)]
    outputs.append(output(stop_reason="EOS_TOKEN", generated_token_count=700))
    if not stream:
        outputs = [output("".join(texts), stop_reason="EOS_TOKEN", generated_token_count=700)]
    body = {"messages": [{"role": "user", "content": "x"}], "tools": [{"function": {"name": "w"}}], "stream": stream}
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    answer = await ask(CHAT, body, *outputs, reasoning=THINK)
    parts = [choice for event in answer.body[:-1] for choice in event["choices"]] if stream else answer.body["choices"]
    deltas = [part["delta" if stream else "message"] for part in parts]
    for name in ("reasoning", "reasoning_content"):
        assert "".join(delta.get(name) or "" for delta in deltas) == thought
    assert not any(delta.get("content") for delta in deltas)
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls") or ()]
    assert json.loads("".join(call["arguments"] for call in calls)) == {"a": 1}
    usage = (answer.body[-2] if stream else answer.body)["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": len(thought)}
    assert not stream or "completion_tokens_details" not in answer.body[0]["usage"]
    assert threading.current_thread() not in threads
    assert answer.call.params.skip_special_tokens is False


@pytest.mark.parametrize("tools", [[], [{"function": {"name": "w"}}]])
@run_async
async def test_thoughts_that_the_prompt_begins(tools: list[Any]) -> None:
    """The mark before an answer is written once: behind the thought, or in the grammar of an answer or calls."""
    body = {"messages": [{"role": "user", "content": "x" + COMMAND.begin}], "tools": tools}
    made = output(f"Hm{COMMAND.end}", stop_reason="EOS_TOKEN", generated_token_count=9)
    answer = await ask(CHAT, body | {"response_format": {"type": "json_object"}}, made, reasoning=COMMAND)
    message, params = answer.body["choices"][0]["message"], answer.call.params
    assert (message["content"], message["reasoning"], params.skip_special_tokens) == (None, "Hm", False)
    assert answer.body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}
    parts = params.grammar.after_thought, params.grammar.text
    assert [part.count("START_RESPONSE") for part in parts] == [not tools, len(tools)]
    assert not tools or '{"type":"object"}' in parts[1]
