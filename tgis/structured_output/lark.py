"""Converts every kind of grammar to Lark, the language that llguidance compiles.

Forced bytes are off: a mask has every token that the grammar allows, not only the canonical tokenization.
"""

import functools
import json
import re
from typing import Any, assert_never

from tgis.errors import GrammarError
from tgis.ipc.lookups import FIRST_TOOL_LINE, GrammarKind, GrammarSpec
from tgis.structured_output.ebnf import ebnf_to_lark, is_ebnf
from tgis.structured_output.json_schema import OPTIONS_KEYWORD, parse_schema

_DIRECTIVE = "%llguidance"
# Tokens of Lark that may contain any text, by llguidance's rules. Unterminated ones match as well, or scanning would be
# quadratic.
_SCHEMA_OR_TEXT = re.compile(
    r"""(?P<schema>%json\s*)
    |"(?:[^"\\]|\\.)*"?  # a string
    |(?:\#|//)[^\n]*
    |/(?:[^/\\]|\\.)*/?  # a regex
    |<[^<>\s]*  # a special token""",
    re.VERBOSE | re.DOTALL,
)
_HEAD = f'{_DIRECTIVE} {{"no_forcing": true}}\n'
# Whitespace between the tokens of JSON is bounded, or a model could fill its limit with blanks.
_WHITESPACE = r" |\r?\n[ \t]{0,32}"
_NOTHING_MATCHES = ("NoExtension", "NoExtensionBias")
_WORDS = {
    "Unimplemented keys": "unsupported keywords",
    'failed to parse "%json"': "not JSON",  # lone surrogates, which Python accepts
    "Resource '": "$ref '",
    "present in a registry and retrieving it failed: Default retriever does not fetch resources": "in this document",
}
# The client's texts in an error, the last one perhaps truncated. Short names of properties, rules and types stay.
_QUOTED = re.compile(
    r"""[ ]?(/.*/|"([^"\\]|\\.)*("|\\?\Z)|\(And[ ].*)
    |(?<=[$]ref)[ ]'.*'|(?<=Pointer)[ ]'.*'|(?<=erence[ ])'.*'|'.{40,}'|(?<=type:[ ]).{41,}|(?<=format:[ ]).{41,}""",
    re.DOTALL | re.VERBOSE,
)
_PLACE = re.compile(r"(?:(?:at )?(\d+)\((\d+)\): )?(.*)", re.DOTALL)


@functools.lru_cache(maxsize=64)
def to_lark(spec: GrammarSpec) -> str:
    """The grammar in Lark; GrammarError if it is invalid or above a limit."""
    rules = _rules(spec)
    if spec.after_thought:  # the rules stay in their lines
        rules = f"answer: %lark {{{rules}\n}}\n{spec.after_thought}\n"
    return _HEAD + rules


def _rules(spec: GrammarSpec) -> str:
    match spec.kind:
        case GrammarKind.JSON_OBJECT:
            return f"start: %json {_bounded({'type': 'object'})}\n"
        case GrammarKind.JSON_SCHEMA:
            return f"start: %json {_schema(spec, spec.text, exact=spec.exact)}\n"
        case GrammarKind.REGEX:
            return f"start: /{_regex(spec.text)}/\n"
        case GrammarKind.CHOICE:
            return f"start: {' | '.join(map(_string, spec.choices))}\n"
        case GrammarKind.GRAMMAR if is_ebnf(spec.text):
            return ebnf_to_lark(spec.text)
        case GrammarKind.GRAMMAR if _DIRECTIVE in spec.text:
            raise GrammarError(f"unsupported directive {_DIRECTIVE}")
        case GrammarKind.GRAMMAR | GrammarKind.TOOLS:
            return _with_checked_schemas(spec)
        case unknown:
            assert_never(unknown)


def problem_of(message: str, spec: GrammarSpec | None = None) -> str:
    """The problem in llguidance's message: without the client's texts, with the place if the client wrote lines."""
    text = re.split(r"\n +\d+ \| ", message.removesuffix("<non-verbose/>"), maxsplit=1)[0].strip()
    if not text or text in _NOTHING_MATCHES:
        return "no text of the model's tokens matches" if text else "too complex"
    line, column, problem = _PLACE.fullmatch(text).groups()  # type: ignore[union-attr]
    if "\nerror: " in problem:  # above it are the regex and an arrow
        problem = f"invalid regex: {problem.rpartition('error: ')[2]}"
    problem = problem.removeprefix("failed to compile JSON schema: ")
    for message, words in _WORDS.items():
        problem = problem.replace(message, words)
    if not problem.startswith("unsupported keywords"):
        problem = _QUOTED.sub("", problem).removesuffix(":")
    match spec and spec.kind:
        case GrammarKind.GRAMMAR if line and spec and is_ebnf(spec.text):  # whose rules have kept their lines
            return f"{problem} in line {int(line) - 1}"
        case GrammarKind.GRAMMAR if line:
            return f"{problem} in line {int(line) - 1}, column {column}"  # below our first line
        case GrammarKind.TOOLS if line and spec:
            return _in_tool(problem, spec, int(line) - 1)
    return problem


def _in_tool(problem: str, spec: GrammarSpec, line: int) -> str:
    """The problem with the place of the schema: a tool, or the answer that may be given instead of a call."""
    is_tool = spec.text.split("\n")[line - 1].startswith("call_")
    return f"{problem} in {f'tools[{line - FIRST_TOOL_LINE}].function.parameters' if is_tool else 'response_format'}"


def _schema(spec: GrammarSpec, text: str, *, exact: bool) -> str:
    """The JSON of a schema that is safe to compile."""
    return _bounded(parse_schema(text, exact=exact, rough=spec.rough and not exact), lenient=not exact)


def _bounded(schema: dict[str, Any], *, lenient: bool = False) -> str:
    """The JSON of a schema with bounded blanks, whose `oneOf` are compiled as `anyOf`, `lenient` without what
    llguidance does not implement.
    """
    options = {"whitespace_pattern": _WHITESPACE, "coerce_one_of": True, "lenient": lenient}
    return json.dumps({**schema, OPTIONS_KEYWORD: options})


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")  # Lark refuses it unescaped


def _regex(text: str) -> str:
    if (len(text) - len(text.rstrip("\\"))) % 2:
        raise GrammarError("ends with a backslash")
    from llguidance import regex_to_lark  # noqa: PLC0415 - 4 MB, for front ends whose clients use no grammars

    return regex_to_lark(text)


def _with_checked_schemas(spec: GrammarSpec) -> str:
    """The grammar with its JSON schemas checked and bounded; strings, regexes and comments contain none."""
    text, parts, last, at = spec.text, list[str](), 0, 0
    while match := _SCHEMA_OR_TEXT.search(text, at):
        start = at = match.end()
        if match["schema"]:
            at = _end_of_json(text, start)
            parts += [text[last:start], _checked_schema(spec, start, at)]
            last = at
    return "".join([*parts, text[last:]])


def _checked_schema(spec: GrammarSpec, start: int, end: int) -> str:
    """The schema at these places of the grammar, over as many lines."""
    line = 1 + spec.text.count("\n", 0, start)
    try:
        schema = _schema(spec, spec.text[start:end], exact=line not in spec.inexact_lines)
    except GrammarError as error:
        in_tool = spec.kind is GrammarKind.TOOLS
        raise GrammarError(_in_tool(str(error), spec, line) if in_tool else f"%json in line {line}: {error}") from None
    return "{" + "\n" * spec.text.count("\n", start, end) + schema[1:]


def _end_of_json(text: str, start: int) -> int:
    """The end of the JSON value that begins at `start`, or of the text if it is invalid."""
    try:
        return json.JSONDecoder().raw_decode(text, start)[1]
    except (RecursionError, ValueError):
        return len(text)
