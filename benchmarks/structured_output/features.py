"""JSON schemas by the feature they use, in the manner of the JSON Schema Test Suite."""

from typing import Any

STRING, INTEGER, NUMBER, BOOLEAN = ({"type": name} for name in ("string", "integer", "number", "boolean"))


def closed(required: list[str] | None = None, **properties: Any) -> dict[str, Any]:
    """An object with these properties only, all of them required unless others are named."""
    names = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


PERSON = closed(name={"type": "string", "maxLength": 12}, age={"type": "integer", "minimum": 0, "maximum": 150})
NODE = {"$defs": {"node": closed(["value"], value=INTEGER, next={"$ref": "#/$defs/node"})}, "$ref": "#/$defs/node"}

FEATURES: dict[str, list[Any]] = {
    "types": [STRING, INTEGER, NUMBER, BOOLEAN, {"type": "null"}, {"type": ["integer", "null"]}, True, {}],
    "strings": [
        {"type": "string", "minLength": 2, "maxLength": 5},
        {"type": "string", "pattern": "^[A-Z]{2}-\\d+$"},
        {"type": "string", "pattern": "b"},
        {"type": "string", "pattern": "^\\w+$", "maxLength": 8},
        {"type": "string", "pattern": '["\\\\/\\n]é?', "maxLength": 6},
    ],
    "numbers": [
        {"type": "integer", "minimum": -5, "exclusiveMaximum": 1234},
        {"type": "number", "exclusiveMinimum": 0, "maximum": 1.5},
        {"type": "integer", "multipleOf": 7},
        {"type": "number", "multipleOf": 0.25, "minimum": -1},
        {"type": "number", "minimum": -12.75, "exclusiveMaximum": -0.5},
    ],
    "enumerations": [
        {"enum": ["red", "green", 'with "quotes" and \\ and é']},
        {"const": {"a": [1, None, "x"]}},
        {"enum": [1, 2.5, True, None, "1", [], {}]},
        {"type": "integer", "enum": [1, "no", 3]},
    ],
    "objects": [
        PERSON,
        closed(["a"], a=INTEGER, b=BOOLEAN, c=STRING),
        {"type": "object", "properties": {"a": INTEGER}, "additionalProperties": BOOLEAN},
        {"type": "object", "properties": {"a": INTEGER}},
        {"type": "object", "patternProperties": {"^n_": INTEGER, "^s_": STRING}, "additionalProperties": False},
        {"type": "object", "properties": {"n_1": BOOLEAN}, "patternProperties": {"^n_": {}}, "required": ["n_1", "x"]},
        {"type": "object", "minProperties": 1, "maxProperties": 2, "additionalProperties": INTEGER},
        {"properties": {"a": False, "b": INTEGER}},
    ],
    "arrays": [
        {"type": "array", "items": INTEGER, "minItems": 1, "maxItems": 3},
        {"type": "array", "prefixItems": [STRING, INTEGER], "items": False},
        {"type": "array", "prefixItems": [BOOLEAN], "items": {"type": "null"}, "minItems": 2},
        {
            "type": "array",
            "items": [INTEGER, STRING],
            "additionalItems": BOOLEAN,
            "$schema": "http://json-schema.org/draft-07/schema#",
        },
        {"type": "array", "maxItems": 0},
    ],
    "combinations": [
        {"anyOf": [INTEGER, closed(a=STRING), {"type": "array", "items": BOOLEAN}]},
        {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}]},
        {"oneOf": [closed(kind={"const": "a"}, x=INTEGER), closed(kind={"const": "b"}, y=STRING)]},
        {
            "allOf": [
                {"type": "object", "properties": {"a": INTEGER}},
                {"required": ["a"], "properties": {"b": BOOLEAN}},
            ]
        },
        {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "number", "minimum": 5}]},
    ],
    "references": [
        NODE,
        closed(first={"$ref": "#/$defs/p"}, second={"$ref": "#/$defs/p"}) | {"$defs": {"p": PERSON}},
        {
            "definitions": {"list": {"type": "array", "items": {"$ref": "#/definitions/list"}}},
            "$ref": "#/definitions/list",
        },
        {"$defs": {"s": {"$id": "urn:size", "enum": ["s", "m"]}}, "type": "array", "items": {"$ref": "urn:size"}},
        {"$defs": {"i": INTEGER}, "$ref": "#/$defs/i", "minimum": 10},
    ],
    "formats": [
        {"type": "string", "format": name}
        for name in ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
    ],
}
