"""Random JSON schemas are refused, or every output can go on until it ends and validates, by another library's word."""

import json
import random
import re
from contextlib import suppress
from typing import Any

import pytest
from grammar_walks import EOS, byte_table, compiled
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.structured_output.validation import FORMATS, problem_of
from tgis.errors import GrammarError
from tgis.ipc.lookups import GrammarKind
from tgis.structured_output.matcher import GrammarMatcher

TABLE = byte_table()
WALKS, MAX_BYTES = 3, 60
FAVOURED = b'ab"}],:{[1'  # names and values that schemas have
WORD = b"0123456789PTDHMSYWabcdefghijklmnopqrstuvwxyz.:-@"
CLOSING = {True: [b'"', WORD], False: [b"}]", b'"', WORD]}  # in a text and elsewhere: the shortest rest of an output
QUOTES = re.compile(rb'\\.|(")')

NAMES = st.sampled_from(["a", "ab", "b", "c"])
# \w and $ of Python are not those of ECMA, where a name matches or does not: no name ends with a line break.
PATTERNS = st.sampled_from(["^a", "b$", "a", "^ab$", ".*", "^[ab]+$", "^a?$", "^(a|b|ab|c)$", "^.{2}$"])
COUNTS, NUMBERS = (
    st.integers(0, 3),
    st.sampled_from([-3, -1, 0, 1, 2, 5, 0.5, 1.5, -0.5, 0.1, -(2**63), 2**63 - 1, 1e30]),
)
TYPES = ["object", "array", "string", "integer", "number", "boolean", "null"]
VALUES = st.sampled_from([None, True, 0, 1, 1.5, -1, "", "a", "ab", [], [1], ["a"], {}, {"a": 1}, {"b": None}])
LEAVES = st.sampled_from([{}, True, False, {"$ref": "#"}, {"$ref": "#/$defs/x"}, *({"type": name} for name in TYPES)])


def keywords(inner: st.SearchStrategy[Any]) -> list[dict[str, st.SearchStrategy[Any]]]:
    """Keywords of each type, and keywords of all."""
    several = st.lists(inner, min_size=1, max_size=3)
    return [
        {
            "properties": st.dictionaries(NAMES, inner, max_size=3),
            "required": st.lists(NAMES, max_size=2, unique=True),
            "additionalProperties": inner,
            "patternProperties": st.dictionaries(PATTERNS, inner, max_size=2),
            "minProperties": COUNTS,
            "maxProperties": COUNTS,
        },
        {"items": inner, "prefixItems": several, "minItems": COUNTS, "maxItems": COUNTS},
        {
            "minLength": COUNTS,
            "maxLength": COUNTS,
            "pattern": PATTERNS,
            "format": st.sampled_from(sorted({"date", "ipv4", "uuid", "email", "duration"} & FORMATS.checkers.keys())),
        },
        {
            **dict.fromkeys(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"], NUMBERS),
            "multipleOf": st.sampled_from([1, 2, 0.5, 0.1, 7]),
        },
        {
            **dict.fromkeys(["anyOf", "allOf", "oneOf"], several),
            "const": VALUES,
            "default": st.dictionaries(st.sampled_from(["maxLength", "x-guidance", "$id", "multipleOf"]), VALUES),
            "enum": st.lists(VALUES, min_size=1, max_size=4),
            "type": st.sampled_from(TYPES) | st.lists(st.sampled_from(TYPES), min_size=1, max_size=2, unique=True),
        },
    ]


def objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    *of_types, of_all = keywords(inner)

    def members(own: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[dict[str, Any]]:
        own = dict(own)
        pairs = [st.tuples(st.just(name), values) for name, values in (own | of_all).items()]
        return st.lists(st.one_of(pairs), min_size=1, max_size=4).map(dict)

    return st.one_of(list(map(members, of_types)))


SCHEMAS = st.recursive(LEAVES, objects, max_leaves=8)


def write(matcher: GrammarMatcher, rng: random.Random) -> bytes | None:
    """An output that ends; None if it has not ended long after it could."""
    tokens: list[int] = []
    while len(tokens) < 8 * MAX_BYTES:
        allowed = matcher.allowed_ids(tokens)
        assert allowed
        ending = len(tokens) > MAX_BYTES
        if EOS in allowed and (ending or len(allowed) == 1 or rng.random() < 0.5):
            return bytes(token - 1 for token in tokens)
        found = [token for token in allowed if token != EOS]
        in_text = sum(map(bool, QUOTES.findall(bytes(token - 1 for token in tokens)))) % 2 > 0
        for wanted in CLOSING[in_text] if ending else [FAVOURED][: rng.random() < 0.8]:
            if favoured := [token for token in found if token - 1 in wanted]:
                found = favoured
                break
        tokens.append(rng.choice(found))
    return None


def check(schema: Any, more: Any, seed: int) -> None:
    if isinstance(schema, dict):
        schema = schema | {"$defs": {"x": more}}
    try:
        matcher = compiled(GrammarKind.JSON_SCHEMA, json.dumps(schema), TABLE)
    except GrammarError:
        return
    for walk in range(WALKS):
        try:
            output = write(matcher.copy(), random.Random(seed + walk))
        except GrammarError:  # a name or a value that none can follow
            output = None
        if output is None:  # combined schemas may refer to themselves for ever
            assert re.search("ref|patternProperties", json.dumps(schema))
            continue
        with suppress(RecursionError):  # of that library, for a schema that is its own alternative
            assert not problem_of(output.decode(), schema)


@pytest.mark.parametrize("examples", [150, pytest.param(5000, marks=pytest.mark.slow)])
def test_outputs_end_and_validate(examples: int) -> None:
    settings(max_examples=examples)(given(SCHEMAS, SCHEMAS, st.integers(0, 99))(check))()
