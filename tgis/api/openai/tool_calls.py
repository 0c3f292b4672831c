"""Finds the tool calls in an output as it grows: text in, text and pieces of calls out.

The formats differ in what stands around a call; a call is a JSON object with a name and arguments. What turns out to be
none stays text. A unary answer comes from the same parser, so it has the same calls as a stream.
"""

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from tgis.frontend.chat_template import ChatTemplate


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family of models writes tool calls: what is read, and one way to write it."""

    start: str  # before one call or more
    end: str = ""  # after them; text may follow
    bare: bool = False  # an output that begins with { is a call as well
    skip: re.Pattern[str] = re.compile(r"\s*")  # between calls
    named: re.Pattern[str] | None = None  # a name that stands before its arguments
    # written: start, unless it is bare, opening, calls with `between` between them, closing
    opening: str = ""
    call: tuple[str, str] = ('{"name": "%s", "arguments": ', "}")  # before and after the arguments
    between: str | None = None  # there is one call only
    closing: str = ""


HERMES = ToolFormat(  # and Qwen
    "<tool_call>",
    "</tool_call>",
    opening="\n",
    between="\n</tool_call>\n<tool_call>\n",
    closing="\n</tool_call>",
)
MISTRAL = ToolFormat(
    "[TOOL_CALLS]",
    skip=re.compile(r"(?:(?!\[TOOL_CALLS\])[\s\[\],])*"),
    named=re.compile(r"([\w.-]+)(?:\[ARGS\])?\s*(?={)"),
    opening=" [",
    between=", ",
    closing="]",
)
MISTRAL_ARGS = replace(MISTRAL, opening="", call=("%s[ARGS]", ""), between="[TOOL_CALLS]", closing="")
LLAMA3 = ToolFormat(
    "<|python_tag|>", bare=True, skip=re.compile(r"[\s;]*"), call=('{"name": "%s", "parameters": ', "}")
)

_HEADER = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_NAME_PREFIX = re.compile(r"[\w.-]+(?:\[[A-Z\]]*)?\s*")
_decoder = json.JSONDecoder()


def tool_format(template: ChatTemplate) -> ToolFormat | None:
    """The format that the template writes earlier calls in; None if it is none of these."""
    mistral = MISTRAL_ARGS if template.mentions("[ARGS]") else MISTRAL
    return next((each for each in (HERMES, mistral, LLAMA3) if template.mentions(each.start)), None)


@dataclass(frozen=True, slots=True)
class ToolCallPiece:
    """A call begins with its name; more pieces of its arguments may follow."""

    index: int
    arguments: str
    name: str | None = None


Piece = str | ToolCallPiece


class ToolCallParser:
    """The parser of one output."""

    def __init__(self, tool_format: ToolFormat) -> None:
        self.num_calls = 0
        self._format = tool_format
        self._text = ""  # not parsed yet
        self._before_call = ""  # what stood where a call was expected
        self._state: Callable[[], list[Piece] | None] = self._begin if tool_format.bare else self._content
        self._braces = _Braces()
        self._wrapped = False  # the arguments are in an object with the name

    def add(self, text: str) -> list[Piece]:
        """Parse what is new."""
        self._text += text
        found: list[Piece] = []
        while (pieces := self._state()) is not None:
            found += pieces
        return found

    def finish(self) -> list[Piece]:
        """The rest of an output that has ended: a call that is not complete is text."""
        rest = self._before_call + self._text
        self._text = self._before_call = ""
        in_call = self._state in (self._arguments, self._tail)
        if in_call or (self.num_calls and self._format.skip.fullmatch(rest)):
            return []
        return [rest] if rest else []

    # Each state parses as much as it can: None if it needs more text, else what it has found before the next state.

    def _begin(self) -> list[Piece] | None:
        if not (text := self._text.lstrip()):
            return None
        self._state = self._between if text.startswith("{") else self._content
        return []

    def _content(self) -> list[Piece] | None:
        at = self._text.find(self._format.start)
        if at >= 0:
            content = self._text[:at].rstrip()
            self._before_call, self._text = self._format.start, self._text[at + len(self._format.start) :]
            self._state = self._between
            return [content] if content else []
        held = _held_length(self._text, self._format.start)
        content, self._text = self._text[: len(self._text) - held], self._text[len(self._text) - held :]
        return [content] if content else None

    def _between(self) -> list[Piece] | None:
        skipped = self._format.skip.match(self._text)
        assert skipped is not None
        text = self._text[skipped.end() :]
        if self._format.end and text.startswith(self._format.end):
            return self._continue(text[len(self._format.end) :], self._content)
        if text.startswith("{"):
            return self._continue(text, self._object, keep=skipped[0])
        if text.startswith(self._format.start):
            return self._continue(text[len(self._format.start) :], self._between)
        if self._format.named and (name := self._format.named.match(text)):
            return self._start_call(name[1], text[name.end() :], wrapped=False)
        may_go_on = not text or any(mark.startswith(text) for mark in (self._format.end, self._format.start) if mark)
        if may_go_on or (self._format.named and _NAME_PREFIX.fullmatch(text)):
            return None
        return self._give_up()

    def _object(self) -> list[Piece] | None:
        if header := _HEADER.match(self._text):
            return self._start_call(json.loads(header[1]), self._text[header.end() :], wrapped=True)
        if "}" not in self._text:
            return None
        try:
            call, end = _decoder.raw_decode(self._text)
        except ValueError:
            return None
        except RecursionError:  # brackets without end
            return self._give_up()
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return self._give_up()
        self._text, self._before_call = self._text[end:], ""
        self._state = self._between
        return [self._next_call(call["name"], _as_text(call.get("arguments", call.get("parameters", {}))))]

    def _arguments(self) -> list[Piece] | None:
        end = self._braces.find_end(self._text)
        piece, self._text = (self._text, "") if end is None else (self._text[:end], self._text[end:])
        if end is not None:
            self._braces = _Braces(depth=1)
            self._state = self._tail if self._wrapped else self._between
        return [ToolCallPiece(self.num_calls - 1, piece)] if piece else None

    def _tail(self) -> list[Piece] | None:
        """The rest of the object around the arguments."""
        end = self._braces.find_end(self._text)
        self._text = "" if end is None else self._text[end:]
        if end is None:
            return None
        self._state = self._between
        return []

    def _start_call(self, name: str, rest: str, *, wrapped: bool) -> list[Piece]:
        self._wrapped, self._braces, self._before_call = wrapped, _Braces(), ""
        self._text, self._state = rest, self._arguments
        return [self._next_call(name, "")]

    def _next_call(self, name: str, arguments: str) -> ToolCallPiece:
        self.num_calls += 1
        return ToolCallPiece(self.num_calls - 1, arguments, name)

    def _continue(self, text: str, state: Callable[[], list[Piece] | None], keep: str = "") -> list[Piece]:
        self._before_call += keep
        self._text, self._state = text, state
        return []

    def _give_up(self) -> list[Piece]:
        """It is text after all."""
        text = self._before_call + self._text
        self._text, self._before_call = "", ""
        self._state = self._content
        return [text]


class _Braces:
    """Where a JSON object ends, in text that comes in pieces."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._in_string = self._escaped = False

    def find_end(self, text: str) -> int | None:
        """Read all of `text`, or up to the brace that closes the object, and return the index after it."""
        for index, character in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped = character == "\\"
                self._in_string = character != '"'
            elif character == '"':
                self._in_string = True
            elif character in "{}":
                self._depth += 1 if character == "{" else -1
                if not self._depth:
                    return index + 1
        return None


def _held_length(text: str, mark: str) -> int:
    """How much at the end may be the beginning of a mark, or the space before one."""
    longest = next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if mark.startswith(text[-n:])), 0)
    rest = text[: len(text) - longest]
    return longest + len(rest) - len(rest.rstrip())


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def complete_calls(pieces: Iterable[Piece]) -> tuple[str, list[tuple[str, str]]]:
    """The text, and name and arguments of each call, of a whole output."""
    texts: list[str] = []
    calls: list[tuple[str, str]] = []
    for piece in pieces:
        if isinstance(piece, str):
            texts.append(piece)
        elif piece.name is not None:
            calls.append((piece.name, piece.arguments))
        else:
            calls[-1] = calls[-1][0], calls[-1][1] + piece.arguments
    return "".join(texts), calls
