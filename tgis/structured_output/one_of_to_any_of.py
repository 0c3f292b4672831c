"""`oneOf` as `anyOf`, which means the same where the schemas exclude each other.

llguidance finds that out itself, but not through a `$ref`, as in the unions with a discriminator that pydantic writes,
and not for numbers.
"""

from itertools import combinations
from typing import Any
from urllib.parse import unquote

from tgis.errors import GrammarError
from tgis.structured_output.inferred_types import combined, inferred_types

OVERLAPS = "oneOf is supported only where its schemas exclude each other"
_TYPES = {"null", "boolean", "object", "array", "number", "string"}
_MAX_HOPS = 8  # from reference to reference
_MAX_DEPTH = 3  # of properties that are compared
_MAX_COMPARISONS = 200_000  # of values and names in all of a schema; about 50 ms


class OneOfRewriter:
    """Rewrites the `oneOf` of one document."""

    def __init__(self, document: Any, *, resolve: bool) -> None:
        """References are followed only with `resolve`."""
        self._document = document
        self._resolve = resolve
        self._comparisons_left = _MAX_COMPARISONS
        self._targets: dict[str, Any] = {}  # by reference
        self._infers = self._leaves = False  # a type, a oneOf; of all schemas so far

    def rewrite(self, schema: dict[str, Any]) -> dict[str, Any]:
        """The schema, or another that means the same."""
        options = schema.get("oneOf")
        self._infers |= bool(inferred_types(schema))
        if not isinstance(options, list) or not all(self._exclusive(*pair) for pair in combinations(options, 2)):
            self._leaves |= "oneOf" in schema
            return schema
        rest = {name: value for name, value in schema.items() if name != "oneOf"}
        if "anyOf" not in rest:
            return rest | {"anyOf": options}
        all_of = rest.get("allOf", [])
        return rest | {"allOf": [*all_of, {"anyOf": options}]} if isinstance(all_of, list) else schema

    def finish(self) -> None:
        """GrammarError if llguidance would compare schemas with types that the client has not written."""
        if self._infers and self._leaves:
            raise GrammarError(OVERLAPS)

    def _exclusive(self, first: Any, second: Any, depth: int = 0) -> bool:
        """Whether it is certain that no value validates with both."""
        first, second = self._target(first), self._target(second)
        if not self._pay(1 + _size(first) + _size(second)):
            return False
        values, others = _values(first), _values(second)
        if values is not None and others is not None:
            return self._pay(len(values) * len(others)) and not any(value in others for value in values)
        first, second = _both_typed(first, second)
        common = _types(first) & _types(second)
        if common != {"object"}:
            return not common
        names = _required(first) & _required(second)
        return (
            depth < _MAX_DEPTH
            and self._pay(len(names))
            and any(self._exclusive(first["properties"][name], second["properties"][name], depth + 1) for name in names)
        )

    def _pay(self, comparisons: int) -> bool:
        self._comparisons_left -= comparisons
        return self._comparisons_left >= 0

    def _target(self, schema: Any) -> dict[str, Any]:
        """What a schema refers to; {}, that is, anything, where that is unknown."""
        for _ in range(_MAX_HOPS):
            if not isinstance(schema, dict):
                break
            if "$ref" not in schema:
                return schema
            schema = self._lookup(schema["$ref"]) if self._resolve else None
        return {}

    def _lookup(self, reference: Any) -> Any:
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return None
        if reference not in self._targets:
            self._targets[reference] = self._find(reference)
        return self._targets[reference]

    def _find(self, reference: str) -> Any:
        value = self._document
        for part in unquote(reference[2:]).split("/"):
            name = part.replace("~1", "/").replace("~0", "~")
            value = value.get(name) if isinstance(value, dict) else None
        return value


def _both_typed(first: dict[str, Any], second: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Both schemas, with the type that is meant if it is the same: a null would validate with one without a type."""
    typed = _typed(first), _typed(second)
    return typed if _types(typed[0]) == _types(typed[1]) else (first, second)


def _typed(schema: dict[str, Any]) -> dict[str, Any]:
    types = [] if combined(schema) else inferred_types(schema)
    return schema | {"type": types} if types else schema


def _size(schema: dict[str, Any]) -> int:
    """How many values and names of a schema are looked at."""
    return sum(len(found) for name in ("enum", "required") if isinstance(found := schema.get(name), list))


def _values(schema: dict[str, Any]) -> list[Any] | None:
    """The only ones that validate, where a schema names them."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) else None


def _types(schema: dict[str, Any]) -> set[str]:
    if (values := _values(schema)) is not None:
        return {_type_of(value) for value in values}
    given = schema.get("type")
    names = given if isinstance(given, list) else [given]
    found = {"number" if name == "integer" else name for name in names if isinstance(name, str)}
    return found if found and found <= _TYPES else _TYPES


def _type_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case str():
            return "string"
        case dict():
            return "object"
        case list():
            return "array"
    return "number"


def _required(schema: dict[str, Any]) -> set[str]:
    """The properties that an object must have, and that have a schema."""
    required, properties = schema.get("required"), schema.get("properties")
    if not isinstance(required, list) or not isinstance(properties, dict):
        return set()
    return {name for name in required if isinstance(name, str) and name in properties}
