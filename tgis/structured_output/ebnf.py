r"""EBNF as llama.cpp (GBNF), vLLM and XGrammar write it, converted to llguidance's Lark.

`root ::= "a" rule* | [0-9]{1,3}` with comments after `#`. Such a grammar describes characters, but Lark matches the
longest terminal, so each character becomes a terminal. Rules stay in their lines, to which llguidance's errors refer.
"""

import re

from tgis.errors import GrammarError

_ESCAPE = r"""\\(?:[nrt\\"'\[\]^/-]|x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8})"""
_NAME = r"[A-Za-z_][\w.-]*"
_TOKEN = re.compile(
    rf"""(?P<skip>\s+|\#[^\n]*)
    |(?P<rule>{_NAME})\s*::=
    |(?P<name>{_NAME})
    |"(?P<double>(?:[^"\\\n]|{_ESCAPE})*)"|'(?P<single>(?:[^'\\\n]|{_ESCAPE})*)'
    |\[(?P<chars>\^?(?:[^\]\\\n]|{_ESCAPE})+)\]
    |(?P<any>\.)
    |(?P<mark>[()|*+?]|\{{\s*\d+\s*(?:,\s*(?:\d+\s*)?)?\}})""",
    re.VERBOSE,
)
_CHARACTER = re.compile(rf"{_ESCAPE}|.")
_RANGE = re.compile(rf"({_ESCAPE}|.)(?:-({_ESCAPE}|.))?")
_SPECIAL = "[]^-&~/"  # special in classes of Rust's regexes, and at the end of one in Lark
_RULE = re.compile(r"^[ \t]*[\w<>-]+\s*::=", re.MULTILINE)


def is_ebnf(text: str) -> bool:
    """Whether a line begins with a rule. A line within a string of a Lark grammar may do so by chance."""
    return _RULE.search(text) is not None


def ebnf_to_lark(text: str) -> str:
    """Convert a grammar; GrammarError for a text that is no token. All other problems are left to llguidance."""
    pieces, at, new_lines = list[str](), 0, 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            line, column = 1 + text.count("\n", 0, at), at - text.rfind("\n", 0, at)
            raise GrammarError(f"unexpected {text[at]!r} in line {line}, column {column}")
        if match.lastgroup == "rule":
            pieces.append("\n" * max(new_lines, bool(pieces)))
            new_lines = 0
        pieces.append(_in_lark(match))
        new_lines += match[0].count("\n")
        at = match.end()
    if "start:" not in pieces:
        raise GrammarError("no rule is named root")
    return "".join(pieces) + "\n"


def _in_lark(token: re.Match[str]) -> str:
    kind = str(token.lastgroup)
    text = token[kind]
    match kind:
        case "skip":
            return ""
        case "rule":
            return f"{_rule_name(text)}:"
        case "name":
            return f" {_rule_name(text)}"
        case "double" | "single":
            characters = " ".join(f"/[{_escaped(char)}]/" for char in _CHARACTER.findall(text))
            return f" ({characters})" if characters else ' ""'
        case "chars" if text != "^":
            negation = "^" if text.startswith("^") else ""
            ends = ([_escaped(char) for char in pair if char] for pair in _RANGE.findall(text.removeprefix("^")))
            return f" /[{negation}{''.join(map('-'.join, ends))}]/"
        case "any" | "chars":
            return " /(?s:.)/"
    return f" {text}" if text in "(|" else text


def _escaped(char: str) -> str:
    """A character or an escape sequence, for a class of a regex."""
    return f"\\{char}" if char in _SPECIAL else char


def _rule_name(name: str) -> str:
    """The name in Lark, which allows lower case only, no hyphens and no dots; different names stay different."""
    return "start" if name == "root" else "r_" + re.sub(r"[^a-z0-9]", lambda char: f"_{ord(char[0]):x}_", name)
