"""EBNF as llama.cpp (GBNF), vLLM and XGrammar write it, converted to llguidance's Lark.

`root ::= "a" rule* | [0-9]{1,3}` with comments after `#`. Such a grammar describes characters, but Lark matches the
longest terminal, so each character becomes a terminal.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from tgis.errors import GrammarError
from tgis.ipc.lookups import MAX_GRAMMAR_DEPTH, MAX_GRAMMAR_REPETITIONS

_TOKEN = re.compile(
    r"""(?P<skip>[ \t\r\n]+|\#[^\n]*)
    |(?P<define>::=)
    |(?P<name>[A-Za-z_][\w.-]*)
    |(?P<literal>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
    |(?P<chars>\[\^?(?:[^\]\\\n]|\\.)*\])
    |(?P<repeat>[*+?]|\{\s*\d+\s*(?:,\s*(?:\d+\s*)?)?\})
    |(?P<mark>[.()|])""",
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|.)", re.DOTALL)
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t"} | {char: char for char in "\\\"'[]^-/"}
_ROOT = "root"
# A sequence between two of these, one of each line, is empty.
_BEGINNINGS = ("define", "|", "(")
_ENDS = ("|", ")", "rule", "end")
_REPEATABLE = ("name", "literal", "chars", ".", ")")
_RULE = re.compile(r"^[ \t]*[\w<>-]+\s*::=", re.MULTILINE)


def is_ebnf(text: str) -> bool:
    """Whether a line begins with a rule. A line within a string of a Lark grammar may do so by chance."""
    return _RULE.search(text) is not None


def ebnf_to_lark(text: str) -> str:
    """Convert a grammar; GrammarError names the problem and its place."""
    return _Converter(text).lark()


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str  # the name of a group of the pattern, or the mark itself
    text: str
    at: int


class _Converter:
    """Converts a grammar token by token."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._depth = 0  # of brackets
        self._defined: set[str] = set()
        self._used: dict[str, _Token] = {}

    def lark(self) -> str:
        tokens = list(self._scan())
        pieces, before = [f"start: {_rule_name(_ROOT)}"], ""
        for token, after in zip(tokens, [*tokens[1:], tokens[-1]], strict=True):
            kind = "rule" if token.kind == "name" and after.kind == "define" else token.kind
            if before in _BEGINNINGS and kind in _ENDS:
                pieces.append('""')
            pieces.append(self._converted(kind, token, before))
            before = kind
        if _ROOT not in self._defined:
            raise GrammarError(f"no rule is named {_ROOT}")
        for name, token in self._used.items():
            if name not in self._defined:
                raise self._error(f"no rule is named {name}", token)
        return "".join(pieces)

    def _scan(self) -> Iterator[_Token]:
        at = 0
        while at < len(self.text):
            match = _TOKEN.match(self.text, at)
            if match is None:
                raise self._error(f"unexpected {self.text[at]!r}", _Token("", "", at))
            assert match.lastgroup is not None
            if match.lastgroup != "skip":
                yield _Token(match[0] if match.lastgroup == "mark" else match.lastgroup, match[0], at)
            at = match.end()
        yield _Token("end", "the end", at)

    def _converted(self, kind: str, token: _Token, before: str) -> str:
        """A token in Lark; `before` is the kind of the previous token, empty for the first."""
        match kind:
            case "rule" if not self._depth:
                return self._define(token)
            case "define" if before == "rule":
                return ": "
            case "repeat" if before in _REPEATABLE:
                return self._repeat(token)
            case "(" if before:
                return self._open(token)
            case ")" if self._depth:
                self._depth -= 1
                return ")"
            case "|" | "name" | "literal" | "chars" | "." if before:
                return f" {self._element(token)}"
            case "end" if not self._depth:
                return "\n"
        raise self._error(f"unexpected {'literal' if kind == 'literal' else token.text}", token)

    def _define(self, token: _Token) -> str:
        if token.text in self._defined:
            raise self._error(f"rule {token.text} is defined twice", token)
        self._defined.add(token.text)
        return f"\n{_rule_name(token.text)}"

    def _open(self, token: _Token) -> str:
        self._depth += 1
        if self._depth > MAX_GRAMMAR_DEPTH:
            raise self._error(f"nested more than {MAX_GRAMMAR_DEPTH} levels deep", token)
        return " ("

    def _element(self, token: _Token) -> str:
        match token.kind:
            case "name":
                self._used.setdefault(token.text, token)
                return _rule_name(token.text)
            case "literal":
                chars = " ".join(lark_string(char) for char, _ in self._characters(token))
                return f"({chars})" if chars else '""'
            case "chars":
                return self._class(token)
            case ".":
                return _regex([], negated=True)
        return token.text

    def _repeat(self, token: _Token) -> str:
        digits = re.findall(r"\d+", token.text)
        longest = len(str(MAX_GRAMMAR_REPETITIONS))
        if any(len(count) > longest or int(count) > MAX_GRAMMAR_REPETITIONS for count in digits):
            raise self._error(f"more than {MAX_GRAMMAR_REPETITIONS} repetitions", token)
        counts = [int(count) for count in digits]
        if len(counts) == 2 and counts[0] > counts[1]:
            raise self._error(f"no number is in {token.text}", token)
        return re.sub(r"\s", "", token.text)

    def _class(self, token: _Token) -> str:
        negated = token.text.startswith("[^")
        chars = list(self._characters(token))[::-1]
        ranges = []
        while chars:
            first, _ = chars.pop()
            last = first
            if len(chars) > 1 and chars[-1] == ("-", False):
                last = chars[-2][0]
                del chars[-2:]
            if last < first:
                raise self._error(f"no character is in {first}-{last}", token)
            ranges.append((first, last))
        if not ranges and not negated:
            raise self._error("an empty class of characters", token)
        return _regex(ranges, negated=negated)

    def _characters(self, token: _Token) -> Iterator[tuple[str, bool]]:
        """The characters of a literal or a class, and whether they were escaped."""
        text = token.text[1:-1].removeprefix("^" if token.kind == "chars" else "")
        at = 0
        while at < len(text):
            escape = _ESCAPE.match(text, at)
            yield (self._unescape(escape[1], token), True) if escape else (text[at], False)
            at = escape.end() if escape else at + 1

    def _unescape(self, escape: str, token: _Token) -> str:
        if len(escape) == 1:
            if escape not in _ESCAPED:
                raise self._error(f"unknown escape \\{escape}", token)
            return _ESCAPED[escape]
        code = int(escape[1:], 16)
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            raise self._error(f"\\{escape} is no character", token)
        return chr(code)

    def _error(self, problem: str, token: _Token) -> GrammarError:
        line = self.text.count("\n", 0, token.at) + 1
        column = token.at - (self.text.rfind("\n", 0, token.at) + 1) + 1
        return GrammarError(f"{problem} in line {line}, column {column}")


def _rule_name(name: str) -> str:
    """The name in Lark, which allows lower case only, no hyphens and no dots; different names stay different."""
    return "r_" + re.sub(r"[^a-z0-9]", lambda match: f"_{ord(match[0]):x}_", name)


def _regex(ranges: list[tuple[str, str]], *, negated: bool) -> str:
    """A regex of one character in these ranges (first, last) or, `negated`, outside of them."""
    if not ranges:
        return "/(?s:.)/"
    written = (f"\\x{{{ord(first):x}}}-\\x{{{ord(last):x}}}" for first, last in ranges)
    return f"/[{'^' * negated}{''.join(written)}]/"


def lark_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")  # Lark refuses it unescaped
