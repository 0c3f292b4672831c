"""Grammars as clients write them: what they allow, and why others are refused."""

import json
from typing import Any

import pytest
from grammar_walks import byte_table, compiled
from tables import table

from benchmarks.structured_output.suite import allows
from tgis.errors import GrammarError
from tgis.ipc.lookups import GrammarKind
from tgis.structured_output.matcher import GrammarMatcher

TABLE = byte_table()
NESTED = "invalid regex: exceed the maximum number of nested parentheses/brackets"
LONG = [
    ("GRAMMAR", "root ::= " + "(" * 60_000, "lark grammar too deeply nested (at ('(')) in line 1"),
    ("GRAMMAR", "start: %json " + "[" * 60_000, "%json in line 1: nested more than 64 levels deep"),
    ("JSON_SCHEMA", "[" * 100_000, "nested more than 64 levels deep"),
    ("JSON_SCHEMA", '{"a":' * 64 + "1" + "}" * 64, "nested more than 64 levels deep"),
    ("JSON_SCHEMA", '{"exclusiveMinimum": 1%s}' % ("0" * 400), "a number has too large an exponent"),
    # llguidance cuts off what it quotes: the end of a string may be missing
    ("JSON_SCHEMA", '{"pattern": ["' + "a" * 200 + '"]}', "Expected string for 'pattern', got ["),
    ("REGEX", "(" * 30_000 + ")" * 30_000, f"{NESTED} (250)"),
]


def matcher_of(row: dict[str, Any]) -> GrammarMatcher:
    """A row has a schema, or a text that is a grammar unless it has another kind."""
    if "schema" in row:
        return compiled(GrammarKind.JSON_SCHEMA, json.dumps(row["schema"]), TABLE)
    return compiled(GrammarKind[row.get("kind", "GRAMMAR")], row["text"], TABLE)


@table("grammars", "allowed")
def test_what_users_write(row: dict[str, Any]) -> None:
    assert allows(matcher_of(row), row["allows"])


@table("grammars", "texts")
def test_texts_of_schemas(row: dict[str, Any]) -> None:
    assert [text for text in row["allows"] + row["refuses"] if allows(matcher_of(row), text)] == row["allows"]


def check_refused(row: dict[str, Any]) -> None:
    with pytest.raises(GrammarError) as error:
        matcher_of(row)
    assert str(error.value) == row["problem"]


@table("grammars", "refused")
def test_errors_name_the_place_and_no_text(row: dict[str, Any]) -> None:
    check_refused(row)


def test_long_texts_are_refused() -> None:
    for kind, text, problem in LONG:
        check_refused({"kind": kind, "text": text, "problem": problem})


@table("grammars", "meant")
@pytest.mark.parametrize("inner", [False, True])
def test_types_are_those_that_clients_mean(row: dict[str, Any], inner: bool) -> None:
    schema, start = row["schema"], ""
    if inner:
        start, definitions = '{"a":', {"s": schema} | schema.get("$defs", {})
        schema = {"properties": {"a": {"$ref": "#/$defs/s"}}, "required": ["a"], "$defs": definitions}
    allowed = matcher_of({"schema": schema}).allowed_ids([byte + 1 for byte in start.encode()])
    assert {chr(token - 1) for token in allowed} - set(" \r\n") == set(row["first"])
