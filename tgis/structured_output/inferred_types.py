"""The types that a client means by a JSON schema without one.

By the standard, `{"properties": {...}}` allows any number, and `{"maxLength": 3}` any object: a keyword says something
about values of one type only. Clients mean an object, and a text. What validates with a type validates without it too.
"""

from typing import Any

_KEYWORDS = {
    "object": {"properties", "required", "patternProperties", "additionalProperties", "minProperties", "maxProperties"},
    "array": {"items", "prefixItems", "additionalItems", "minItems", "maxItems"},
    "string": {"minLength", "maxLength", "pattern", "format"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
}
_SAY_TYPE = {"type", "const", "enum", "$ref"}


def with_type(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with the types of its keywords, unless one that it is combined with says its type."""
    types = inferred_types(schema)
    return schema | {"type": types} if types and not any(map(_says_type, combined(schema))) else schema


def inferred_types(schema: dict[str, Any]) -> list[str]:
    """The types that its keywords are for, unless it says its type itself."""
    return [] if _SAY_TYPE & schema.keys() else [name for name, words in _KEYWORDS.items() if words & schema.keys()]


def combined(schema: dict[str, Any]) -> list[Any]:
    """The schemas that it is combined with."""
    found = [schema.get(name) for name in ("allOf", "anyOf", "oneOf")]
    return [each for options in found if isinstance(options, list) for each in options]


def _says_type(schema: Any) -> bool:
    return isinstance(schema, dict) and (bool(_SAY_TYPE & schema.keys()) or any(map(_says_type, combined(schema))))
