"""The tools that an output may call, and the grammar of its calls if arguments must match their schemas.

They must with a `tool_choice` of `required` or a function; arguments of `strict` functions always must.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from tgis.api.openai.bodies import ChatCompletionRequest, Tool
from tgis.api.openai.tool_calls import ToolFormat
from tgis.errors import InvalidRequest
from tgis.ipc.lookups import FIRST_TOOL_LINE, GrammarKind, GrammarSpec

MAX_TOOLS = 1024
_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
_MARK = re.compile(r"(</?\|?\w+\|?>|\[[A-Z_]+\])")  # in a format: perhaps a special token
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_ANY_PARAMETERS = {"type": "object"}
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
    def names(self) -> frozenset[str]:
        """The functions that may be called."""
        names = frozenset(tool.function.name for tool in self.tools)
        return names if self.name is None else names & {self.name}

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


class ToolGrammar:
    """Grammars of outputs in one format: calls, or text that may end with calls."""

    def __init__(self, tool_format: ToolFormat, special_token_id: Callable[[str], int | None]) -> None:
        """Marks of the format that are special tokens are matched as such."""
        self._format = tool_format
        self._special_token_id = special_token_id

    def spec(self, choice: ToolChoice, answer: GrammarSpec | None = None) -> GrammarSpec:
        """InvalidRequest if a tool cannot be called. With an `answer`, the only text without a call is one."""
        calls = [""] * len(choice.tools)
        before, after = self._format.call
        for index, name, arguments in choice.callable():
            schema = msgspec.json.encode(arguments).decode()
            calls[index] = f"call_{index}: {self._lark(before % name)} %json {schema} {self._lark(after)}"
        head = [self._start(choice, answer)]
        assert len(head) == FIRST_TOOL_LINE - 1
        call = " | ".join(rule.partition(":")[0] for rule in calls if rule)
        text = [f"answer: %json {_answer_schema(answer)}"] if answer else self._text()
        lines = [*head, *calls, f"call: {call}", self._calls(choice), *text]
        inexact = [line for line, tool in enumerate(choice.tools, FIRST_TOOL_LINE) if not tool.function.strict]
        if answer and not answer.exact:
            inexact.append(len(lines))
        return GrammarSpec(GrammarKind.TOOLS, "\n".join(lines), inexact_lines=tuple(inexact))

    def _start(self, choice: ToolChoice, answer: GrammarSpec | None) -> str:
        mark = "" if self._format.bare else self._lark(self._format.start)
        if choice.required:
            return f"start: {mark} calls"
        return f"start: {mark} calls | answer" if answer else f"start: {mark and 'text_and_mark'} calls | TEXT"

    def _calls(self, choice: ToolChoice) -> str:
        form = self._format
        several = f"({self._lark(form.between)} call)*" if choice.parallel and form.between else ""
        return f"calls: {self._lark(form.opening)} call {several} {self._lark(form.closing)}"

    def _text(self) -> Iterator[str]:
        """Rules of text that the parser reads no call in."""
        mark = self._format.start
        any_text = r"/\s*([^{\s](?s:.*))?/" if self._format.bare else "/(?s:.*)/"
        yield f"TEXT: {any_text} & ~/(?s:.*){re.escape(mark)}(?s:.*)/"
        lazy = "" if self._special_token_id(mark) is not None else "[lazy]"
        yield f"text_and_mark{lazy}: TEXT {self._lark(mark)}"

    def _lark(self, text: str) -> str:
        parts = ((part, self._special_token_id(part)) for part in _MARK.split(text) if part)
        return " ".join(json.dumps(part) if id_ is None else f"<[{id_}]>" for part, id_ in parts)
