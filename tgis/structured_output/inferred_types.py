"""Types of JSON schemas without `type`, inferred from their keywords.

By the standard, `{"properties": {...}}` allows any number and `{"maxLength": 3}` any object, since a keyword constrains
values of one type only. Clients mean an object and a string. Values of the inferred type validate in both readings.
"""

from typing import Any

_KEYWORDS = {
    "object": {"properties", "required", "patternProperties", "additionalProperties", "minProperties", "maxProperties"},
    "array": {"items", "prefixItems", "additionalItems", "minItems", "maxItems"},
    "string": {"minLength", "maxLength", "pattern", "format"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
}
_TYPED_BY = {"type", "const", "enum", "$ref"}


def with_type(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with the types of its keywords, unless a schema that it is combined with has a type."""
    types = inferred_types(schema)
    return schema | {"type": types} if types and not any(map(_has_type, combined(schema))) else schema


def inferred_types(schema: dict[str, Any]) -> list[str]:
    """The types that the keywords are for, unless the schema has a type."""
    return [] if _TYPED_BY & schema.keys() else [name for name, words in _KEYWORDS.items() if words & schema.keys()]


def combined(schema: dict[str, Any]) -> list[Any]:
    """The schemas of `allOf`, `anyOf` and `oneOf`."""
    lists = [schema.get(name) for name in ("allOf", "anyOf", "oneOf")]
    return [option for options in lists if isinstance(options, list) for option in options]


def _has_type(schema: Any) -> bool:
    return isinstance(schema, dict) and (bool(_TYPED_BY & schema.keys()) or any(map(_has_type, combined(schema))))
