"""Finds the tool calls in an output as it grows: text in, text and pieces of calls out.

The formats differ in what stands around a call; a call names an offered tool and has arguments that can be read. All
else is text, to the character. A unary answer comes from the same parser, so it has the same calls as a stream.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import regex

from tgis.api.openai.call_arguments import json_call, python_arguments, without_constants, xml_arguments
from tgis.api.openai.tool_formats import ToolFormat, XmlParameters


@functools.cache
def _starts(form: ToolFormat) -> "regex.Pattern[str]":
    """A pattern for the marks before a first call."""
    return regex.compile("|".join(regex.escape(mark) for mark in (form.start, form.other_start) if mark))


@functools.cache
def _next_part_pattern(form: ToolFormat) -> "regex.Pattern[str]":
    """A pattern for the place where a call may begin: groups `end`, `start`, `name` or `object`."""
    marks = f"(?P<end>{regex.escape(form.end) or '(?!)'})|(?P<start>{_starts(form).pattern})"
    return regex.compile(rf"{form.skip}(?:{marks}|{form.named}|(?P<object>(?=\{{)))")


# The beginning of an object whose arguments come last, as nearly all do: these are streamed.
_HEADER = regex.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*|"tool_call_id"\s*:\s*"\w*"\s*,\s*)?'
    r'"(?:tool_)?name"\s*:\s*"(?P<name>[\w.-]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_PARTIAL_CONSTANT = regex.compile(r"-?(?:Na?N?|I?[a-z]{0,7})\Z")  # a beginning of NaN or -Infinity, among others
_MAX_HEADER = 1024  # characters
_MAX_GAP = 1024  # characters before a mark, between calls, or of a name
_MAX_STEP = 4096  # characters that are parsed at once: what is held is copied when a part of it has been parsed


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

    def __init__(self, tool_format: ToolFormat, tools: Mapping[str, Any]) -> None:
        """Only these `tools` may be called: by name, the schemas of their arguments."""
        self.num_calls = 0
        self._format = tool_format
        self._tools = tools
        self._held = ""
        self._mark_end = 0  # end of the mark in the held text if no call follows
        self._at = 0  # beginning of the call in the held text
        self._num_read = 0  # characters of the held text that `_scanner` has read
        self._called = False  # since the mark
        self._wrapped = False  # the arguments are in an object with the name
        self._scanner: _Brackets | _Mark = _Brackets()
        self._convert: Callable[[str], tuple[str, str] | None] = self._json_call  # a complete call
        self._state: Callable[[], list[Piece] | None] = self._bare if tool_format.bare else self._content

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

    def _bare(self) -> list[Piece] | None:
        """The beginning of an output, where a call may stand without a mark."""
        if not (beginning := self._held.lstrip()) and len(self._held) < _MAX_GAP:
            return None
        marks = beginning.startswith((*self._format.bare,))
        self._state = self._next_part if marks else self._content
        return []

    def _content(self) -> list[Piece] | None:
        mark = _starts(self._format).search(self._held, self._mark_end, partial=True)
        end = mark.start() if mark else len(self._held)
        text = self._held[: max(len(self._held[:end].rstrip()), end - _MAX_GAP)]
        self._held = self._held[len(text) :]
        self._mark_end = 0
        if mark and not mark.partial:
            self._mark_end = self._at = mark.end() - len(text)
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
            self._hold_call(part.end(), _Brackets(), self._json_call)
            self._state = self._object
        elif kind == "name" and part["name"] in self._tools:
            return self._named_call(part["name"], part.end())
        elif kind == "start":
            self._at = self._mark_end = part.end()
        elif kind == "end" and self._called:
            self._end_part(part.end())
            self._state = self._content
        else:
            return self._no_call()
        return []

    def _named_call(self, name: str, end: int) -> list[Piece]:
        layout = self._format.arguments
        scanner: _Brackets | _Mark = _Brackets("()", "\"'", depth=1)
        convert: Callable[[str], str | None] = python_arguments
        if isinstance(layout, XmlParameters):
            scanner = _Mark(layout.end, end)
            convert = functools.partial(xml_arguments, layout, schema=self._tools[name])
        elif layout == "{}":
            return self._start_call(name, end, wrapped=False)

        def call(text: str) -> tuple[str, str] | None:
            return None if (arguments := convert(text)) is None else (name, arguments)

        self._hold_call(end, scanner, call)
        return []

    def _hold_call(
        self, at: int, scanner: "_Brackets | _Mark", convert: Callable[[str], tuple[str, str] | None]
    ) -> None:
        self._at = self._num_read = at
        self._scanner, self._convert, self._state = scanner, convert, self._held_call

    def _object(self) -> list[Piece] | None:
        header = _HEADER.match(self._held, self._at, self._at + _MAX_HEADER)
        if header is not None and header["name"] in self._tools:
            return self._start_call(header["name"], header.end(), wrapped=True)
        return self._held_call()

    def _held_call(self) -> list[Piece] | None:
        """A call that is read when it is complete."""
        if (end := self._scanner.find_end(self._held, self._num_read)) is None:
            self._num_read = len(self._held)
            return None
        if (call := self._convert(self._held[self._at : end])) is None:
            self._mark_end = end  # objects inside are not read again
            return self._no_call()
        self._end_part(end)
        self._state = self._next_part
        return [self._next_call(*call)]

    def _json_call(self, text: str) -> tuple[str, str] | None:
        return json_call(text, self._tools)

    def _arguments(self) -> list[Piece] | None:
        assert isinstance(self._scanner, _Brackets)
        before = self._scanner.open_text
        end = self._scanner.find_end(self._held)
        piece = self._held[:end]
        if end is None and not self._scanner.open_text:
            piece = _PARTIAL_CONSTANT.sub("", piece)
        self._end_part(len(piece))
        if end is not None:
            self._scanner = _Brackets(depth=1)
            self._state = self._tail if self._wrapped else self._next_part
        piece = without_constants(before + piece)[len(before) :]
        return [ToolCallPiece(self.num_calls - 1, piece)] if piece else None

    def _tail(self) -> list[Piece] | None:
        """The rest of the object around the arguments."""
        end = self._scanner.find_end(self._held)
        self._end_part(len(self._held) if end is None else end)
        if end is None:
            return None
        self._state = self._next_part
        return []

    def _start_call(self, name: str, end: int, *, wrapped: bool) -> list[Piece]:
        self._wrapped, self._scanner, self._state = wrapped, _Brackets(), self._arguments
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


class _Brackets:
    """Finds the end of brackets in text that comes in pieces, of a JSON object or of a call in Python."""

    def __init__(self, pair: str = "{}", quotes: str = '"', depth: int = 0) -> None:
        self._pair, self._quotes, self._depth = pair, quotes, depth
        self._open_quote = ""
        self._escaped = False

    @property
    def open_text(self) -> str:
        """A beginning of a text that is read as the open one is; empty outside of texts."""
        return self._open_quote + "\\" * self._escaped

    def find_end(self, text: str, start: int = 0) -> int | None:
        """Read `text` from `start` on, or up to the bracket that closes all, and return the index after it."""
        for index in range(start, len(text)):
            character = text[index]
            if self._escaped:
                self._escaped = False
            elif self._open_quote:
                self._escaped = character == "\\"
                self._open_quote = "" if character == self._open_quote else self._open_quote
            elif character in self._quotes:
                self._open_quote = character
            elif character in self._pair:
                self._depth += 1 if character == self._pair[0] else -1
                if not self._depth:
                    return index + 1
        return None


@dataclass(frozen=True, slots=True)
class _Mark:
    """Finds a mark behind `begin` in text that comes in pieces."""

    mark: str
    begin: int

    def find_end(self, text: str, start: int = 0) -> int | None:
        """Return the index after the mark; up to `start`, the text has been searched."""
        at = text.find(self.mark, max(self.begin, start - len(self.mark) + 1))
        return None if at < 0 else at + len(self.mark)


def complete_calls(pieces: Iterable[Piece]) -> tuple[str, list[tuple[str, str]]]:
    """The text, and name and arguments of each call, of a complete output."""
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
