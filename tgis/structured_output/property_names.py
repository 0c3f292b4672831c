"""Whether an object that may have more properties than those that are named can have them.

llguidance lets the comma before the next name pass, and only then finds out that there is none.
"""

import functools
import json
from collections.abc import Iterable
from typing import Any

import llguidance

from tgis.errors import GrammarError

_MAX_COST = 20_000  # of all objects with patterns
_COST = 100  # of one, and 1 for each name; about a millisecond
_LEXER_FUEL = 1_000_000  # of all


@functools.cache
def _byte_tokenizer() -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer("byte")


def check_names(members: Iterable[tuple[str, Any]]) -> None:
    """GrammarError where the names that a pattern matches may all be taken; whose, depends on how schemas combine."""
    taken: dict[str, bool] = {}
    patterns: set[tuple[str, ...]] = set()
    closed = False
    for name, value in members:
        if name == "properties" and isinstance(value, dict):
            taken |= dict.fromkeys(value, False)
        elif name == "required" and isinstance(value, list):
            taken |= dict.fromkeys((each for each in value if isinstance(each, str)), False)
        elif name == "patternProperties" and isinstance(value, dict):
            patterns.add(tuple(value))
        elif name == "additionalProperties":
            closed = closed or value not in (True, {})
    if not closed or not taken:
        return
    if (_COST + len(taken)) * len(patterns) > _MAX_COST:
        raise GrammarError("patternProperties: too complex")
    for each in patterns:
        if each and not _has_name(each, taken, _LEXER_FUEL // len(patterns)):
            raise GrammarError("patternProperties must match other names than those of properties and required")


def _has_name(patterns: tuple[str, ...], taken: dict[str, bool], fuel: int) -> bool:
    schema = {"type": "object", "properties": taken, "patternProperties": dict.fromkeys(patterns, True)}
    grammar = llguidance.grammar_from("json_schema", json.dumps(schema | {"additionalProperties": False}))
    limits = llguidance.LLParserLimits(initial_lexer_fuel=fuel)
    matcher = llguidance.LLMatcher(_byte_tokenizer(), grammar, log_level=0, limits=limits)
    return matcher.is_error() or matcher.try_consume_tokens(list(b'{"')) == 2
