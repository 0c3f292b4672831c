"""Grammars that hostile clients would send: random, mutated, and expensive to follow."""

import json
import random
import string
from typing import Any

from benchmarks.structured_output.features import FEATURES
from tgis.pb import generation_pb2 as pb

_SCHEMAS = [schema for schemas in FEATURES.values() for schema in schemas]
_ALPHABET = string.ascii_lowercase[:6] + 'é世\n"\\ '
_LONG = "nonsense" * 2000  # errors quote names
_NUMBERS = (-1, 0, 1, 2, 7, 99, 9_999, 10_001, 2**31, 1e300, 0.5, 1e-9)


def random_grammar(draw: random.Random) -> pb.DecodingParameters:
    return draw.choice(_KINDS)(draw)


def _schema(draw: random.Random) -> pb.DecodingParameters:
    return pb.DecodingParameters(json_schema=json.dumps(_random_schema(draw, 3)))


def _random_schema(draw: random.Random, depth: int) -> Any:
    if depth == 0 or draw.random() < 0.2:
        return draw.choice([*_SCHEMAS, {"type": "string"}, {"type": "integer"}, True, False])

    def inner() -> Any:
        return _random_schema(draw, depth - 1)

    names = draw.sample(["a", "b", "a b", "é", ""], draw.randint(0, 4))
    members: dict[str, Any] = {
        "type": lambda: draw.choice(["object", "array", "string", "number", ["null", "boolean"], _LONG]),
        "properties": lambda: {name: inner() for name in names},
        "required": lambda: names,
        "additionalProperties": inner,
        "patternProperties": lambda: {_pattern(draw, 2): inner() for _ in names},
        "items": inner,
        "prefixItems": lambda: [inner() for _ in names],
        "anyOf": lambda: [inner() for _ in names],
        "oneOf": lambda: [inner() for _ in names],
        "allOf": lambda: [inner() for _ in names],
        "not": inner,
        "enum": lambda: draw.choices([1, "a", None, {}, [1.5]], k=draw.randint(0, 3)),
        "$ref": lambda: draw.choice(["#", "#/$defs/x", "https://example.org/x", _LONG]),
        "$defs": lambda: {"x": inner()},
        "pattern": lambda: _pattern(draw, 3),
        "format": lambda: draw.choice(["date-time", "ipv6", "uri", "regex", "nonsense"]),
        draw.choice(["minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"]): lambda: (
            draw.choice(_NUMBERS)
        ),
        draw.choice(["minimum", "maximum", "exclusiveMinimum", "multipleOf"]): lambda: draw.choice(_NUMBERS),
    }
    return {name: members[name]() for name in draw.sample([*members], draw.randint(1, 4))}


def _regex(draw: random.Random) -> pb.DecodingParameters:
    return pb.DecodingParameters(regex=_pattern(draw, 4))


def _pattern(draw: random.Random, depth: int) -> str:
    if depth == 0 or draw.random() < 0.1:
        classes = ["[^a]", r"\w", r"\d", ".", r"\p{L}", "[a-f]", "(?i:ab)", "^", "$", r"\b", "(?=a)", r"\1"]
        return draw.choice([*classes, *map(_escaped, _ALPHABET)])
    one = _pattern(draw, depth - 1)
    most = draw.choice([1, 3, 40, 200, 10_001])
    other = _pattern(draw, depth - 1)
    return draw.choice([one + other, f"({one}|{other})", f"({one})*", f"({one}){{0,{most}}}", f"({one})?{other}"])


def _escaped(char: str) -> str:
    return "\\" + char if char in '\\"' else char


def _ebnf(draw: random.Random) -> pb.DecodingParameters:
    words = ['"a"', '"bc"', "x", "y", "[a-f]", "[^x]", "(x y)", '(y | "b")', '""', ".", draw.choice(["root", ")", "z"])]
    return pb.DecodingParameters(grammar=_rules(draw, words, "{} ::= {}", ("root", "x", "y")))


def _lark(draw: random.Random) -> pb.DecodingParameters:
    words = [
        '"a"',
        '"bc"',
        "x",
        "y",
        "A",
        "/[a-f]+/",
        "/(a|b)*c/",
        "(x y)",
        "%json {}",
        draw.choice(["start", ")", "z"]),
    ]
    return pb.DecodingParameters(grammar=_rules(draw, words, "{}: {}", ("start", "x", "y")) + "\nA: /[a-c]/")


def _rules(draw: random.Random, words: list[str], form: str, names: tuple[str, ...]) -> str:
    repeated = ["", "", "", "*", "+", "?", "{2,9}", " |"]
    return "\n".join(
        form.format(
            name, " ".join(draw.choice(words) + draw.choice(repeated) for _ in range(draw.randint(1, 5))) + ' "a"'
        )
        for name in names
    )


def _choice(draw: random.Random) -> pb.DecodingParameters:
    texts = ["".join(draw.choices(_ALPHABET, k=draw.randint(0, 12))) for _ in range(draw.choice([1, 2, 9, 2000]))]
    return pb.DecodingParameters(choice=pb.DecodingParameters.StringChoices(choices=texts))


def _mutated(draw: random.Random) -> pb.DecodingParameters:
    text = [*json.dumps(draw.choice(_SCHEMAS))]
    for _ in range(draw.randint(1, 5)):
        text[draw.randrange(len(text))] = draw.choice('{}[]":,0123456789aet' + "".join(draw.sample(text, 1)))
    return pb.DecodingParameters(json_schema="".join(text))


def _expensive(draw: random.Random) -> pb.DecodingParameters:
    """Expensive grammars: ambiguity, large automata, long lists, deep nesting."""
    size = draw.choice([3, 30, 300])
    optional = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(size)}}
    variants = {"anyOf": [{"type": "object", "properties": {f"p{n}": {}}} for n in range(size)]}
    ambiguous = "\n".join(["start: x x x x", f"x: {' | '.join(['/a+/', '/[a-f]*/', '/(ab|a)*b?/', 'x x'])}"])
    rules = [f"x{n} ::= x{(n + 1) % 5} x{n * 2 % 5} | x{n} x{(n + 2) % 5} | [ab]" for n in range(5)]
    return draw.choice(
        [
            pb.DecodingParameters(grammar="\n".join(["root ::= x0", *rules])),
            pb.DecodingParameters(regex=f"(.*a.{{{size}}})"),
            pb.DecodingParameters(regex=f"((a?){{{size}}}(a|b|ab)*){{{size}}}"),
            pb.DecodingParameters(regex=f"(\\w{{1,{size}}} ?){{1,{size}}}"),
            pb.DecodingParameters(regex="|".join(f"{n}.*{n}" for n in range(size))),
            pb.DecodingParameters(json_schema=json.dumps(optional)),
            pb.DecodingParameters(json_schema=json.dumps(variants)),
            pb.DecodingParameters(json_schema=json.dumps({"enum": [f"{n:x}" * 9 for n in range(10 * size)]})),
            pb.DecodingParameters(json_schema=json.dumps({"type": "array", "items": optional, "maxItems": size})),
            pb.DecodingParameters(grammar=ambiguous),
            pb.DecodingParameters(grammar="root ::= x*\nx ::= " + " | ".join(f'"{n}" x?' for n in range(size))),
            pb.DecodingParameters(grammar="root ::= " + "(" * size + '"a"' + ")*" * size),
        ]
    )


_KINDS = (_schema, _schema, _regex, _regex, _ebnf, _lark, _choice, _mutated, _expensive)
