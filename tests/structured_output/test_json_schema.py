"""What is generated under a JSON schema validates, by another library's word; what cannot be promised is refused."""

import json
import random
from typing import Any

import jsonschema
import pytest
from grammar_walks import byte_table, compiled, walk
from json_schemas import REFUSED, SCHEMAS

from tgis.errors import GrammarError
from tgis.ipc.grammars import GrammarKind

PIECES = [
    *('{"', '": ', '", "', '"}', "[[", "]]", "}}", ", ", "::", "true", "null", "123", "-0", ".5", "e+1", "\n  ", '\\"'),
    *("\\u00e9", "é", "ab", "name", "age", '"n_1"', "red", "s_", "value", "next", '"kind"', "2024-0", "@a."),
]
TABLE = byte_table(piece.encode() for piece in PIECES)
WALKS, MAX_TOKENS = 12, 80
MAX_BLANKS = 34  # in a row, outside of strings


@pytest.mark.parametrize("category", SCHEMAS)
def test_finished_outputs_validate(category: str) -> None:
    rng, num_finished = random.Random(category), 0
    for schema in SCHEMAS[category]:
        matcher = compiled(GrammarKind.JSON_SCHEMA, json.dumps(schema), TABLE)
        checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
        validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)(
            schema, format_checker=checker
        )
        for _ in range(WALKS):
            tokens, finished = walk(matcher.copy(), rng, MAX_TOKENS)
            if finished:
                text = output(tokens)
                validator.validate(json.loads(text, parse_constant=_no_number))
                num_finished += 1
    assert num_finished > WALKS


def _no_number(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def output(tokens: list[int]) -> str:
    return b"".join(TABLE_BYTES[token] for token in tokens).decode()


TABLE_BYTES = [b"", *(bytes([byte]) for byte in range(256)), *(piece.encode() for piece in PIECES)]


@pytest.mark.parametrize(("schema", "problem"), REFUSED)
def test_what_is_not_enforced_is_refused_by_name(schema: Any, problem: str) -> None:
    with pytest.raises(GrammarError) as error:
        compiled(GrammarKind.JSON_SCHEMA, json.dumps(schema), TABLE)
    assert str(error.value) == problem


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ("[" * 100_000, "nested more than 64 levels deep"),
        ('{"a":' * 65 + "1" + "}" * 65, "nested more than 64 levels deep"),
        ('{"minimum": NaN}', "not JSON: NaN is no number"),
    ],
)
def test_what_is_no_schema_is_refused(text: str, problem: str) -> None:
    with pytest.raises(GrammarError) as error:
        compiled(GrammarKind.JSON_SCHEMA, text, TABLE)
    assert str(error.value) == problem


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


@pytest.mark.parametrize("text", ['{"a": 1, "b": [true, null]}', '{"a":1}', '{\n  "a": {\n    "b": []\n  }\n}', "{}"])
def test_usual_layouts_are_allowed(text: str) -> None:
    matcher = compiled(GrammarKind.JSON_OBJECT, "", TABLE)
    tokens = [byte + 1 for byte in text.encode()]
    assert all(token in matcher.allowed_ids(tokens[:at]) for at, token in enumerate([*tokens, 0]))
