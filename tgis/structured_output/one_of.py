"""Checks that the schemas of each `oneOf` exclude each other, so that llguidance may compile it as `anyOf`."""

from itertools import combinations
from typing import Any
from urllib.parse import unquote

from tgis.errors import GrammarError
from tgis.structured_output.inferred_types import combined, inferred_types

_TYPES = {"null": type(None), "boolean": bool, "object": dict, "array": list, "string": str, "number": float}
_OVERLAPS = "its schemas must differ in type, in constant or in a required property"
_MAX_HOPS = 8  # length of a chain of references
_MAX_DEPTH = 3  # nesting of properties
_MAX_COST = 50_000  # compared values and names, and characters of references, per document: about 20 ms


class OneOfChecker:
    """Checks each `oneOf` of one document."""

    def __init__(self, document: Any, *, resolve: bool) -> None:
        """References are followed only with `resolve`."""
        self._document = document
        self._resolve = resolve
        self._cost = 0

    def check(self, schema: dict[str, Any], place: str) -> None:
        """GrammarError unless the schemas of `oneOf` certainly exclude each other."""
        options = schema.get("oneOf")
        if not isinstance(options, list):
            return
        if not self._exclusive([self._target(option) for option in options]):
            raise GrammarError(f"oneOf at {place:.80}: {_OVERLAPS}")

    def _exclusive(self, schemas: list[dict[str, Any]], depth: int = 0) -> bool:
        """Whether no value validates with two schemas: by types and constants, or by properties of objects."""
        self._add_cost(sum(1 + _size(schema) for schema in schemas))
        objects = [schema for schema in schemas if _is_object(schema)]
        seen: dict[type, set[Any]] = {}
        for schema in sorted(schemas, key=_is_object, reverse=True):
            values = _values_by_type(schema)
            if not _is_object(schema) and _overlap(values, seen):
                return False
            for kind in values:
                seen.setdefault(kind, set()).update(values[kind])
        return self._discriminated(objects, depth) or all(
            _excludes(*pair) or _excludes(*reversed(pair)) or self._discriminated([*pair], depth)
            for pair in combinations(objects, 2)
        )

    def _discriminated(self, objects: list[dict[str, Any]], depth: int) -> bool:
        """Whether the schemas of one required property exclude each other."""
        self._add_cost(sum(1 + _size(schema) for schema in objects))
        names = [_required(schema) & _properties(schema).keys() for schema in objects]
        return depth < _MAX_DEPTH and any(
            self._exclusive([self._target(_properties(schema)[name]) for schema in objects], depth + 1)
            for name in sorted(set.intersection(*names) if names else ())
        )

    def _target(self, schema: Any) -> dict[str, Any]:
        """The schema that a reference leads to, or {}, which allows any value, if that is unknown."""
        for _ in range(_MAX_HOPS):
            if not isinstance(schema, dict):
                break
            if "$ref" not in schema:
                return schema
            self._add_cost(len(str(schema["$ref"])))
            schema = self._lookup(schema["$ref"]) if self._resolve else None
        return {}

    def _lookup(self, reference: Any) -> Any:
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return None
        value = self._document
        for part in unquote(reference[2:]).split("/"):
            name = part.replace("~1", "/").replace("~0", "~")
            value = value.get(name) if isinstance(value, dict) else None
        return value

    def _add_cost(self, cost: int) -> None:
        self._cost += cost
        if self._cost > _MAX_COST:
            raise GrammarError("oneOf: too many values and names to compare")


def _is_object(schema: dict[str, Any]) -> bool:
    if "type" in schema:
        return schema["type"] in ("object", ["object"])
    return inferred_types(schema) == ["object"] and not combined(schema)


def _overlap(first: dict[type, set[Any]], second: dict[type, set[Any]]) -> bool:
    pairs = ((first[kind], second[kind]) for kind in first.keys() & second.keys())
    return any(... in left or ... in right or left & right for left, right in pairs)


def _excludes(closed: dict[str, Any], schema: dict[str, Any]) -> bool:
    """Whether an object cannot have all properties that the other schema requires."""
    is_closed = closed.get("additionalProperties") is False and "patternProperties" not in closed
    return is_closed and not _required(schema) <= _properties(closed).keys()


def _values_by_type(schema: dict[str, Any]) -> dict[type, set[Any]]:
    """The values that validate, by type: constants, or an ellipsis for all values of the type."""
    constants = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(constants, list):
        values: dict[type, set[Any]] = {}
        for value in constants:
            kind = float if type(value) is int else type(value)
            values.setdefault(kind, set()).add(value if isinstance(value, str | int | float) else ...)
        return values
    names = schema.get("type")
    names = names if isinstance(names, list) else [names]
    types = {_TYPES.get(str(name).replace("integer", "number")) for name in names}
    return {kind: {...} for kind in _TYPES.values() if kind in types or None in types}


def _size(schema: dict[str, Any]) -> int:
    """The number of values and names of a schema that are compared."""
    return sum(len(names) for name in ("enum", "required") if isinstance(names := schema.get(name), list))


def _required(schema: dict[str, Any]) -> set[str]:
    required = schema.get("required")
    return {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()


def _properties(schema: dict[str, Any]) -> dict[str, Any]:
    properties = schema.get("properties")
    return properties if isinstance(properties, dict) else {}
