"""What is generated under a JSON schema validates, by another library's word; what cannot be promised is refused."""

import json
import random
from collections.abc import Iterable
from datetime import date
from typing import Any

import pytest
from grammar_walks import byte_table, compiled, walk
from tables import read_table

from benchmarks.structured_output import suite
from benchmarks.structured_output.features import FEATURES, INTEGER, STRING, closed
from benchmarks.structured_output.schemas import CLIENTS
from benchmarks.structured_output.validation import FORMATS, problem_of
from tgis.errors import GrammarError
from tgis.ipc.lookups import GrammarKind, GrammarSpec
from tgis.structured_output.compiler import compile_grammar
from tgis.structured_output.json_schema import parse_schema

PIECES = [
    *('{"', '": ', '", "', '"}', "[[", "]]", "}}", ", ", "::", "true", "null", "123", "-0", ".5", "e+1", "\n  ", '\\"'),
    *("\\u00e9", "é", "ab", "name", "age", '"n_1"', "red", "s_", "value", "next", '"kind"', "2024-0", "@a."),
]
TABLE = byte_table(piece.encode() for piece in PIECES)
WALKS, MAX_TOKENS = 12, 80
MAX_BLANKS = 34  # in a row, outside of strings

OVERLAPS = "its schemas must differ in type, in constant or in a required property"


@pytest.mark.parametrize("category", FEATURES)
def test_finished_outputs_validate(category: str) -> None:
    rng = random.Random(category)
    assert sum(count_finished(schema, rng) for schema in FEATURES[category]) > WALKS


def count_finished(schema: dict[str, Any], rng: random.Random) -> int:
    """How many random outputs end; each of them is checked to validate."""
    matcher, num_finished = compiled(GrammarKind.JSON_SCHEMA, json.dumps(schema), TABLE), 0
    for _ in range(WALKS):
        tokens, finished = walk(matcher.copy(), rng, MAX_TOKENS)
        if finished:
            assert not problem_of(output(tokens), schema)
            num_finished += 1
    return num_finished


def test_all_formats_are_checked() -> None:
    assert {schema["format"] for schema in FEATURES["formats"]} <= FORMATS.checkers.keys()


def allows(schema: Any, texts: Iterable[Any]) -> list[Any]:
    """Those that may be a whole output."""
    matcher = compiled(GrammarKind.JSON_SCHEMA, json.dumps(schema), TABLE)
    return [text for text in texts if suite.allows(matcher, json.dumps(text))]


def test_dates_are_those_of_the_calendar() -> None:
    years = (0, 1, 4, 100, 400, 1900, 1999, 2000, 2023, 2024, 2100, 9999)
    days = [
        f"{year:04}-{month:02}-{day:02}"
        for year in years
        for month in (0, 2, 4, 12, 13)
        for day in (0, 1, *range(28, 33))
    ]
    valid = [day for day in days if is_date(day)]
    assert allows({"type": "string", "format": "date"}, days) == valid
    times = [f"{day}T12:00:00Z" for day in days]
    assert allows({"type": "string", "format": "date-time"}, times) == [f"{day}T12:00:00Z" for day in valid]


def is_date(text: str) -> bool:
    try:
        return bool(date.fromisoformat(text))
    except ValueError:
        return False


def test_host_names_have_253_characters_at_most() -> None:
    names = ["a", f"{'a.' * 126}b", f"{'a.' * 126}bc", f"{'a' * 63}.b", f"{'a' * 64}.b"]
    assert allows({"type": "string", "format": "hostname"}, names) == [names[0], names[1], names[3]]


def test_values_and_names_may_look_like_keywords() -> None:
    schema = {
        "type": "object",
        "properties": {"const": {"format": "date"}, "uniqueItems": False, "oneOf": {"const": {"oneOf": [{}, {}]}}},
        "const": {"format": "time", "uniqueItems": False},
    }
    rewritten = parse_schema(json.dumps(schema))
    assert rewritten["const"] == schema["const"]
    assert "format" not in rewritten["properties"]["const"]
    assert rewritten["properties"]["uniqueItems"] is False
    assert rewritten["properties"]["oneOf"] == {"const": {"oneOf": [{}, {}]}}
    named = {"properties": {"format": {"const": "date"}}}
    assert parse_schema(json.dumps(named))["properties"] == named["properties"]


def tagged(tag: Any, **properties: Any) -> dict[str, Any]:
    return closed(None, kind={"const": tag, "type": "string"}, **properties)


DEFS = {"$defs": {"Cat": tagged("cat", lives=INTEGER), "Dog": tagged("dog", name=STRING), "Size": {"enum": [1, 2]}}}
EXCLUSIVE: list[dict[str, Any]] = read_table("grammars", "exclusive")
EXCLUSIVE.append({"oneOf": [tagged(f"kind {number}", name=STRING) for number in range(300)]})
EXCLUSIVE.append({"oneOf": [{"const": number} for number in range(2000)]})
OVERLAPPING: list[dict[str, Any]] = read_table("grammars", "overlapping")
OVERLAPPING.append({"oneOf": [tagged(f"kind {number % 299}") for number in range(300)]})


@pytest.mark.parametrize("schema", OVERLAPPING, ids=range(len(OVERLAPPING)))
def test_one_of_what_may_overlap_is_refused(schema: dict[str, Any]) -> None:
    text = json.dumps(DEFS | schema)
    with pytest.raises(GrammarError, match=f"oneOf at #: {OVERLAPS}"):
        compiled(GrammarKind.JSON_SCHEMA, text, TABLE)
    compile_grammar(GrammarSpec(GrammarKind.JSON_SCHEMA, text, exact=False), TABLE)


@pytest.mark.parametrize("category", CLIENTS)
def test_what_clients_send_is_accepted(category: str) -> None:
    for schema in CLIENTS[category]:
        compiled(GrammarKind.JSON_SCHEMA, json.dumps(schema), TABLE)


ACCEPTED: list[dict[str, Any]] = [*read_table("grammars", "kept"), *(DEFS | schema for schema in EXCLUSIVE)]


@pytest.mark.parametrize("schema", ACCEPTED, ids=range(len(ACCEPTED)))
def test_what_can_be_kept_is_kept(schema: dict[str, Any]) -> None:
    assert count_finished(schema, random.Random(1))


@pytest.mark.parametrize("kind", ["integer", "number"])
def test_bounds_of_int64_and_beyond(kind: str) -> None:
    """A few values next to the ends of int64 may be missing, and none is too many."""
    for least, most in ((-(2**63), 2**63 - 1), (-(2**64), 2**64), (-1e30, 1e300)):
        for names in (("minimum", "maximum"), ("exclusiveMinimum", "exclusiveMaximum")):
            schema = {"type": kind, **dict(zip(names, (least, most), strict=True))}
            inside = [0, -9223372036854770000, 9223372036854770000]
            assert allows(schema, [*inside, -(10**31), 10**301]) == inside
    assert allows({"type": "integer", "maximum": 2**63 - 1}, [2**63 - 1, 2**63]) == [2**63 - 1]


@pytest.mark.parametrize("value", [{"maxLength": 10**9, "x-guidance": {}}, {"multipleOf": 99999, "oneOf": [{}, {}]}])
def test_keywords_in_values_are_values(value: dict[str, Any]) -> None:
    inner = {"properties": {"default": {"type": "string"}, "const": {"items": {"examples": [value]}}}}
    for schema in ({"const": value}, {"enum": [value]}, inner | {"const": value}, inner | {"enum": [1, value]}):
        assert allows(schema, [value, {}]) == [value]
    assert allows(inner | {"default": value, "examples": [value]}, [{"default": "a", "const": [value]}])
    leading = {"$ref": "#/%64efault", "default": {"type": "string"} | value}
    with pytest.raises(GrammarError, match=r"^(unsupported keyword x-guidance|maxLength|multipleOf)"):
        parse_schema(json.dumps(leading))


def output(tokens: list[int]) -> str:
    return b"".join(TABLE_BYTES[token] for token in tokens).decode()


TABLE_BYTES = [b"", *(bytes([byte]) for byte in range(256)), *(piece.encode() for piece in PIECES)]


def test_references_do_not_multiply_what_is_compared() -> None:
    schemas: Any = {"allOf": [{"oneOf": [{"$ref": "#/a"}, {"$ref": "#/b"}]}] * 500}
    for large in ({"enum": [*range(8000)]}, {"type": "object", "required": [*map(str, range(8000))]}):
        schemas |= {"a": large, "b": STRING}
        with pytest.raises(GrammarError, match="oneOf: too many values and names to compare"):
            parse_schema(json.dumps(schemas))


def test_blanks_are_bounded() -> None:
    """A model that likes nothing better than blanks still has to go on."""
    blanks = {token for token, data in enumerate(TABLE_BYTES) if data and not data.strip()}
    matcher = compiled(GrammarKind.JSON_OBJECT, "", TABLE)
    tokens: list[int] = [ord("{") + 1]
    run = 0
    while run <= MAX_BLANKS and (allowed := blanks & set(matcher.allowed_ids(tokens))):
        tokens.append(max(allowed))
        run += len(TABLE_BYTES[tokens[-1]])
    assert 1 < run <= MAX_BLANKS
