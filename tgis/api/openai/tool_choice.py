"""The tools that an output may call, and the grammar of its calls if arguments must match their schemas.

They must with a `tool_choice` of `required` or a function; arguments of `strict` functions always must.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgspec

from tgis.api.openai.bodies import ChatCompletionRequest, Tool
from tgis.api.openai.call_arguments import schema_types
from tgis.api.openai.grammars import GrammarMarks
from tgis.api.openai.tool_formats import LLAMA3, ToolFormat, XmlParameters
from tgis.errors import InvalidRequest
from tgis.ipc.lookups import FIRST_TOOL_LINE, GrammarKind, GrammarSpec

MAX_TOOLS = 1024
_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_ANY_PARAMETERS = {"type": "object"}
# In schemas of arguments that may be marked texts, and in schemas of texts that may not.
_PARAMETERS_KEYWORDS = {"type", "properties", "required", "additionalProperties", "title", "description", "$schema"}
_TEXT_KEYWORDS = {"const", "pattern", "format", "minLength", "maxLength", "$ref"}
_COMBINATIONS = {"anyOf", "oneOf", "allOf", "not", "if"}
_SHOWN = 40  # characters of a value in an error


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """The tools that a request offers, and whether the output must call one."""

    tools: Sequence[Tool]  # shown by the template; empty: no calls
    required: bool = False  # the output consists of calls
    name: str | None = None  # the only function that may be called, once
    parallel: bool = True  # several calls are allowed

    @classmethod
    def of(cls, body: ChatCompletionRequest) -> "ToolChoice":
        """The choice of a request; InvalidRequest if no output could meet it."""
        tools, given = body.tools or (), body.tool_choice
        if len(tools) > MAX_TOOLS:
            raise InvalidRequest("tools", f"tools must be at most {MAX_TOOLS}", str(len(tools)))
        parallel = body.parallel_tool_calls is not False
        if given in (None, "auto", "none"):
            return cls(() if given == "none" else tools, parallel=parallel)
        if not tools:
            raise InvalidRequest("tool_choice", "tool_choice must be none or auto without tools")
        if given == "required":
            return cls(tools, required=True, parallel=parallel)
        name = given.function.name if isinstance(given, Tool) else given  # TGI's way
        if not any(tool.function.name == name for tool in tools):
            text = "tool_choice must be none, auto, required or one of the tools"
            raise InvalidRequest("tool_choice", text, name[:_SHOWN])
        return cls(tools, required=True, name=name, parallel=False)

    @property
    def needs_grammar(self) -> bool:
        return self.required or any(tool.function.strict for tool in self.tools)

    @property
    def schemas(self) -> dict[str, Any]:
        """The functions that may be called, and the schemas of their arguments, which may be null."""
        functions = (tool.function for tool in self.tools if self.name in (None, tool.function.name))
        return {function.name: function.parameters for function in functions}

    def format(self, known: ToolFormat | None) -> ToolFormat | None:
        """The format of the model's calls if there may be any: required ones are JSON if its own is not `known`."""
        return (known or (LLAMA3 if self.required else None)) if self.tools else None

    def callable(self) -> Iterator[tuple[int, str, Any]]:
        """Index and name of each function that may be called, and the schema of its arguments."""
        for index, tool in enumerate(self.tools):
            function, path = tool.function, f"tools[{index}].function"
            if self.name not in (None, function.name):
                continue
            if not _NAME.fullmatch(function.name):
                text = f"{path}.name must have 1 to 64 letters, digits, '_', '-' and '.'"
                raise InvalidRequest(f"{path}.name", text, function.name[:_SHOWN])
            exact = self.required or function.strict
            yield index, function.name, _arguments(function.parameters, path) if exact else _ANY_PARAMETERS


def _arguments(parameters: dict[str, Any] | None, path: str) -> dict[str, Any]:
    if parameters is None:
        return _NO_PARAMETERS
    kind = parameters.get("type", "object")
    if "object" not in (kind if isinstance(kind, list) else [kind]):
        raise InvalidRequest(f"{path}.parameters", f"{path}.parameters must have the type object", str(kind)[:_SHOWN])
    return parameters | {"type": "object"}


def _answer_schema(answer: GrammarSpec) -> str:
    if answer.kind not in (GrammarKind.JSON_SCHEMA, GrammarKind.JSON_OBJECT):
        raise InvalidRequest("structured_outputs", "with tools, structured outputs must be JSON", str(answer.kind))
    try:  # on one line, and nothing but JSON
        return msgspec.json.encode(msgspec.json.decode(answer.text or '{"type": "object"}')).decode()
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest("response_format", f"the schema is not JSON: {error}") from None


def _may_be_marked(schema: dict[str, Any]) -> bool:
    """False if a schema has what only JSON can be held to."""
    parts, required = schema.get("properties", {}), schema.get("required", [])
    is_open = schema.get("additionalProperties", "properties" not in schema) is not False
    return schema == _ANY_PARAMETERS or (
        schema.keys() <= _PARAMETERS_KEYWORDS
        and isinstance(parts, dict)
        and isinstance(required, list)
        and all(name in [*parts] for name in required)
        and bool(parts or not is_open)
        and all(map(_NAME.fullmatch, parts))
        and all(map(_part_may_be_marked, parts.values()))
    )


def _part_may_be_marked(part: Any) -> bool:
    if not isinstance(part, dict) or part.keys() & _TEXT_KEYWORDS:
        return False
    if "string" in schema_types(part) and part.keys() & _COMBINATIONS:
        return False
    options = part.get("enum", [])
    return isinstance(options, list) and all(isinstance(option, str) for option in options)


class ToolGrammar:
    """Grammars of outputs in one format: calls, or text that may end with calls."""

    def __init__(self, tool_format: ToolFormat, marks: GrammarMarks, answer_mark: str = "") -> None:
        """`answer_mark` is before text that is no call."""
        self._format = tool_format
        self._marks = marks
        self._answer_mark = marks.lark(answer_mark)

    def spec(self, choice: ToolChoice, answer: GrammarSpec | None = None) -> GrammarSpec:
        """InvalidRequest if a tool cannot be called. With an `answer`, the only text without a call is one."""
        calls = [""] * len(choice.tools)
        for index, name, arguments in choice.callable():
            calls[index] = f"call_{index}: {self._call(name, arguments)}"
        head = [self._start(choice, answer)]
        assert len(head) == FIRST_TOOL_LINE - 1
        call = " | ".join(rule.partition(":")[0] for rule in calls if rule)
        layout = self._format.arguments
        values = self._marks.until("value", layout.parameter[1]) if isinstance(layout, XmlParameters) else ()
        text = [f"answer: %json {_answer_schema(answer)}"] if answer else self._text()
        lines = [*head, *calls, f"call: {call}", self._calls(choice), *values, *text]
        inexact = [line for line, tool in enumerate(choice.tools, FIRST_TOOL_LINE) if not tool.function.strict]
        if answer and not answer.exact:
            inexact.append(len(lines))
        return GrammarSpec(GrammarKind.TOOLS, "\n".join(lines), inexact_lines=tuple(inexact))

    def _start(self, choice: ToolChoice, answer: GrammarSpec | None) -> str:
        mark = "" if self._format.bare else self._marks.lark(self._format.start)
        if choice.required:
            return f"start: {mark} calls"
        if answer or self._answer_mark:
            return f"start: {mark} calls | {self._answer_mark} {'answer' if answer else 'TEXT'}"
        return f"start: {mark and 'text_and_mark'} calls | TEXT"

    def _call(self, name: str, schema: dict[str, Any]) -> str:
        layout, (before, after), lark = self._format.arguments, self._format.call, self._marks.lark
        arguments = f"%json {msgspec.json.encode(schema).decode()}"
        if isinstance(layout, XmlParameters) and _may_be_marked(schema):
            before, after = layout.call
            arguments = self._parameters(layout, schema)
        return f"{lark(before % name)} {arguments} {lark(after)}"

    def _parameters(self, layout: XmlParameters, schema: dict[str, Any]) -> str:
        """Marked texts for the properties, in their order; without properties, for any."""
        (before, after), lark = layout.parameter, self._marks.lark
        if schema == _ANY_PARAMETERS:
            head, tail = map(lark, before.split("%s"))
            return rf"({head} /[^<>\n]+/ {tail} value_and_mark)*"
        rules = list[str]()
        for key, part in schema.get("properties", {}).items():
            if "string" not in schema_types(part):
                value = f"%json {msgspec.json.encode(part).decode()} {lark(after)}"
            elif "enum" in part:
                value = f"({' | '.join(map(json.dumps, part['enum']))}) {lark(after)}"
            else:
                value = "value_and_mark"
            rules.append(f"({lark(before % key)} {value}){'' if key in schema.get('required', ()) else '?'}")
        return " ".join(rules)

    def _calls(self, choice: ToolChoice) -> str:
        form, lark = self._format, self._marks.lark
        several = f"({lark(form.between)} call)*" if choice.parallel and form.between is not None else ""
        return f"calls: {lark(form.opening)} call {several} {lark(form.closing)}"

    def _text(self) -> Iterator[str]:
        """Rules of text that the parser reads no call in."""
        form = self._format
        any_text = rf"/\s*([^{re.escape(form.bare)}\s](?s:.*))?/" if form.bare else "/(?s:.*)/"
        rules = self._marks.until("text", form.start, form.other_start, any_text=any_text)
        return islice(rules, 1) if self._answer_mark else rules
