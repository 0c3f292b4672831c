"""Finds the tool calls in an output as it grows: text in, text and pieces of calls out.

The formats differ in what stands around a call; a call is a JSON object with the name of an offered tool and arguments.
All else is text, to the character. A unary answer comes from the same parser, so it has the same calls as a stream.
"""

import functools
import json
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace

import regex

from tgis.api.openai.chat_template import ChatTemplate


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family of models writes tool calls: how they are read, and one way to write them."""

    start: str  # before the first call
    end: str = ""  # after the last call; text may follow
    bare: bool = False  # an output that begins with { is a call as well
    skip: str = r"\s*"  # pattern of the text between calls
    named: str = r"(?!)"  # pattern of a name before its arguments, as the group `name`
    # Written are: start, unless it is bare, opening, calls with `between` between them, closing.
    opening: str = ""
    call: tuple[str, str] = ('{"name": "%s", "arguments": ', "}")  # before and after the arguments
    between: str | None = None  # None: a single call
    closing: str = ""


@functools.cache
def _next_part_pattern(form: ToolFormat) -> "regex.Pattern[str]":
    """A pattern for the place where a call may begin: groups `end`, `start`, `name` or `object`."""
    marks = f"(?P<end>{regex.escape(form.end) or '(?!)'})|(?P<start>{regex.escape(form.start)})"
    return regex.compile(rf"{form.skip}(?:{marks}|{form.named}|(?P<object>(?=\{{)))")


HERMES = ToolFormat(  # and Qwen
    "<tool_call>",
    "</tool_call>",
    opening="\n",
    between="\n</tool_call>\n<tool_call>\n",
    closing="\n</tool_call>",
)
MISTRAL = ToolFormat(
    "[TOOL_CALLS]",
    skip=r"(?:(?!\[TOOL_CALLS\])[\s\[\],])*",
    named=r"(?P<name>[\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{)",
    opening=" [",
    between=", ",
    closing="]",
)
MISTRAL_ARGS = replace(MISTRAL, opening="", call=("%s[ARGS]", ""), between="[TOOL_CALLS]", closing="")
LLAMA3 = ToolFormat("<|python_tag|>", bare=True, skip=r"[\s;]*", call=('{"name": "%s", "parameters": ', "}"))

# The beginning of an object whose arguments come last, as nearly all do: these are streamed.
_HEADER = regex.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"(?P<name>[\w.-]+)"\s*,\s*'
    r'"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_MAX_HEADER = 1024  # characters
_MAX_GAP = 1024  # characters before a mark, between calls, or of a name
_MAX_STEP = 4096  # characters that are parsed at once: what is held is copied when a part of it has been parsed


def tool_format(template: ChatTemplate | None, *, required: bool) -> ToolFormat | None:
    """The format in which the template writes earlier calls.

    If it is none of these, required calls are plain JSON, and other outputs have none.
    """
    mistral = MISTRAL_ARGS if template and template.mentions("[ARGS]") else MISTRAL
    known = (form for form in (HERMES, mistral, LLAMA3) if template and template.mentions(form.start))
    return next(known, LLAMA3 if required else None)


@dataclass(frozen=True, slots=True)
class ToolCallPiece:
    """A call begins with its name; more pieces of its arguments may follow."""

    index: int
    arguments: str
    name: str | None = None


Piece = str | ToolCallPiece


class ToolCallParser:
    """The parser of one output.

    A possible beginning of a call is held back, with the white space before it, until it is known to be one.
    """

    def __init__(self, tool_format: ToolFormat, names: Collection[str]) -> None:
        """Only the tools with these `names` may be called."""
        self.num_calls = 0
        self._format = tool_format
        self._names = names
        self._held = ""
        self._mark_end = 0  # in the held text: its end if no call follows
        self._at = 0  # in the held text: the beginning of the call
        self._num_read = 0  # characters of the held text that `_braces` has read
        self._called = False  # since the mark
        self._wrapped = False  # the arguments are in an object with the name
        self._braces = _Braces()
        self._state: Callable[[], list[Piece] | None] = self._next_part if tool_format.bare else self._content

    def add(self, text: str) -> list[Piece]:
        """Parse more text."""
        parsed: list[Piece] = []
        for start in range(0, len(text), _MAX_STEP):
            self._held += text[start : start + _MAX_STEP]
            while (pieces := self._state()) is not None:
                parsed += pieces
        return parsed

    def finish(self) -> list[Piece]:
        """The rest of an output that has ended: a call that has not begun is text."""
        rest, self._held = self._held, ""
        in_call = self._state in (self._arguments, self._tail)
        if in_call or (self.num_calls and regex.fullmatch(self._format.skip, rest)):
            return []
        return [rest] if rest else []

    # Each state parses as much as it can. It returns None if it needs more text, else the pieces before the next state.

    def _content(self) -> list[Piece] | None:
        mark = self._format.start
        at = self._held.find(mark, self._mark_end)
        end = at if at >= 0 else len(self._held) - _partial_length(self._held[self._mark_end :], mark)
        text = self._held[: max(len(self._held[:end].rstrip()), end - _MAX_GAP)]
        self._held = self._held[len(text) :]
        self._mark_end = 0
        if at >= 0:
            self._mark_end = self._at = at + len(mark) - len(text)
            self._called, self._state = False, self._next_part
            return [text] if text else []
        return [text] if text else None

    def _next_part(self) -> list[Piece] | None:
        limit = self._at + _MAX_GAP
        part = _next_part_pattern(self._format).match(self._held, self._at, limit, partial=True)
        if part is None or (part.partial and len(self._held) >= limit):
            return self._no_call()
        if part.partial:
            return None
        kind = part.lastgroup
        if kind == "object":
            self._at = self._num_read = part.end()
            self._braces, self._state = _Braces(), self._object
        elif kind == "name" and part["name"] in self._names:
            return self._start_call(part["name"], part.end(), wrapped=False)
        elif kind == "start":
            self._at = self._mark_end = part.end()
        elif kind == "end" and self._called:
            self._end_part(part.end())
            self._state = self._content
        else:
            return self._no_call()
        return []

    def _object(self) -> list[Piece] | None:
        header = _HEADER.match(self._held, self._at, self._at + _MAX_HEADER)
        if header is not None and header["name"] in self._names:
            return self._start_call(header["name"], header.end(), wrapped=True)
        if (end := self._braces.find_end(self._held, self._num_read)) is None:
            self._num_read = len(self._held)
            return None
        if (call := _parse_call(self._held[self._at : end], self._names)) is None:
            self._mark_end = end  # objects inside are not read again
            return self._no_call()
        self._end_part(end)
        self._state = self._next_part
        return [self._next_call(*call)]

    def _arguments(self) -> list[Piece] | None:
        end = self._braces.find_end(self._held)
        piece = self._held[:end]
        self._end_part(len(piece))
        if end is not None:
            self._braces = _Braces(depth=1)
            self._state = self._tail if self._wrapped else self._next_part
        return [ToolCallPiece(self.num_calls - 1, piece)] if piece else None

    def _tail(self) -> list[Piece] | None:
        """The rest of the object around the arguments."""
        end = self._braces.find_end(self._held)
        self._end_part(len(self._held) if end is None else end)
        if end is None:
            return None
        self._state = self._next_part
        return []

    def _start_call(self, name: str, end: int, *, wrapped: bool) -> list[Piece]:
        self._wrapped, self._braces, self._state = wrapped, _Braces(), self._arguments
        self._end_part(end)
        return [self._next_call(name, "")]

    def _next_call(self, name: str, arguments: str) -> ToolCallPiece:
        self.num_calls += 1
        self._called = True
        return ToolCallPiece(self.num_calls - 1, arguments, name)

    def _end_part(self, end: int) -> None:
        """Drop the parsed part of the held text, which is a call."""
        self._held, self._at, self._mark_end = self._held[end:], 0, 0

    def _no_call(self) -> list[Piece]:
        """Treat the held text up to the end of the mark as text; a call may begin behind it."""
        self._state = self._content
        return []


class _Braces:
    """Finds the end of a JSON object in text that comes in pieces."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._in_string = self._escaped = False

    def find_end(self, text: str, start: int = 0) -> int | None:
        """Read `text` from `start` on, or up to the brace that closes the object, and return the index after it."""
        for index in range(start, len(text)):
            character = text[index]
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


def _partial_length(text: str, mark: str) -> int:
    """The number of characters at the end that may begin a mark."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if mark.startswith(text[-n:])), 0)


def _parse_call(text: str, names: Collection[str]) -> tuple[str, str] | None:
    """Name and arguments of a JSON object; None if it calls none of these tools."""
    try:
        call = json.loads(text)
        name, arguments = call.get("name"), call.get("arguments", call.get("parameters"))
        if isinstance(arguments, str):  # JSON in JSON
            arguments = json.loads(arguments or "{}")
        if not isinstance(name, str) or name not in names or not isinstance(arguments, dict | None):
            return None
        return name, json.dumps(arguments or {})
    except (ValueError, RecursionError):
        return None


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
