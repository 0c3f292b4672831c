"""tgis.api.openai.tool_formats: each reads what a template of its family writes, and probing the template finds it."""

import json
from pathlib import Path
from typing import Any

import pytest
from chat_templates import load_template, write_template
from tables import table

from demo.fake_model import make_fake_model
from tgis.api.openai.tool_calls import Piece, ToolCallParser, complete_calls
from tgis.api.openai.tool_formats import COMMAND_R, MISTRAL_ARGS, TOOL_FORMATS, ToolFormat

FORMATS = {name: form for name, (form, *_) in TOOL_FORMATS.items()} | {
    "mistral-args": MISTRAL_ARGS,
    "command_r": COMMAND_R,
}
TYPES = {"a": {"type": "integer"}, "b": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "d": {"anyOf": True}}
TOOLS: dict[str, Any] = dict.fromkeys(["w", "x", "now", "function"]) | {"s": {"properties": TYPES}}
CALLS = [
    ("w", {"city": "Paris", "days": 2}),
    ("x", {"text": "a > b\n\"c\", 'd'", "list": [1, {"a": None}], "yes": True}),
]
USER = {"role": "user", "content": "x"}


def read(form: ToolFormat, output: str, size: int) -> tuple[str, list[tuple[str, Any]]]:
    parser, pieces = ToolCallParser(form, TOOLS), list[Piece]()
    for at in range(0, len(output), size):
        pieces += parser.add(output[at : at + size])
    text, calls = complete_calls([*pieces, *parser.finish()])
    return text, [(name, json.loads(arguments)) for name, arguments in calls]


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
        assert read(form, output, size) == (row.get("text", ""), calls)


@table("tool_formats", "outputs")
def test_other_outputs(row: dict[str, Any]) -> None:
    for size in range(1, len(row["output"]) + 1):
        text, calls = read(FORMATS[row["format"]], row["output"], size)
        assert (text, calls) == (row["text"], [(name, json.loads(arguments)) for name, arguments in row["calls"]])


def test_names_of_vllm_go_first(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, {"begin": "a", "calls": "{% for c in calls %}<tool_call>{{ c | tojson }}</tool_call>{% endfor %}"})
    assert load_template(tmp_path).formats.tools == FORMATS["hermes"]
    assert load_template(tmp_path, "olmo3").formats.tools == FORMATS["olmo3"]
    assert load_template(tmp_path, "x").formats.tools == FORMATS["hermes"]
    assert "unknown parser x: the chat template is probed; known are hermes, mistral, " in caplog.text
