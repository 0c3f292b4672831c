"""What the references of a JSON schema refer to, and whether a value of that can end."""

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from tgis.errors import GrammarError

_MAX_VISITS = 200_000  # of schemas, while it is found out which references end; about 100 ms


class References:
    """The references of one document."""

    def __init__(self, document: Any, *, resolve: bool) -> None:
        """None is followed without `resolve`."""
        self._document = document
        self._resolve = resolve
        self._targets: dict[str, Any] = {}  # by reference

    def target(self, reference: Any) -> Any:
        """The schema that is referred to; None where that is unknown."""
        if not self._resolve or not isinstance(reference, str) or (reference != "#" and not reference.startswith("#/")):
            return None
        if reference not in self._targets:
            self._targets[reference] = self._find(reference)
        return self._targets[reference]

    def _find(self, reference: str) -> Any:
        value = self._document
        for part in unquote(reference).split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            value = value.get(name) if isinstance(value, dict) else None
        return value


class EndingReferences:
    """Which references have a value that ends: of a list that must contain such a list, none does."""

    def __init__(self, references: References, names: set[str]) -> None:
        self._open = {name: target for name in names if isinstance(target := references.target(name), dict)}
        self._visits_left = _MAX_VISITS

    def check(self) -> None:
        """GrammarError if one has none."""
        while ending := [name for name, target in self._open.items() if self._ends(target)]:
            for name in ending:
                del self._open[name]
        if self._open:
            raise GrammarError("$ref: nothing that ends validates with a schema that refers to itself")

    def _ends(self, schema: Any) -> bool:
        """Whether something does that has open references nowhere."""
        self._visits_left -= 1
        if self._visits_left < 0:
            raise GrammarError("$ref: too complex")
        if not isinstance(schema, dict):
            return True
        any_of = (options for name in ("anyOf", "oneOf") if (options := _list(schema, name)))
        reference = schema.get("$ref")
        return (
            not (isinstance(reference, str) and reference in self._open)
            and all(map(self._ends, _needed(schema)))
            and all(any(map(self._ends, options)) for options in any_of)
        )


def _needed(schema: dict[str, Any]) -> Iterator[Any]:
    """The schemas of which every value that validates has one."""
    yield from _list(schema, "allOf")
    properties, num_items = schema.get("properties", {}), schema.get("minItems", 0)
    if schema.get("type") in ("object", ["object"]) and isinstance(properties, dict):
        others = None if "patternProperties" in schema else schema.get("additionalProperties")
        yield from (properties.get(name, others) for name in _list(schema, "required") if isinstance(name, str))
    if schema.get("type") in ("array", ["array"]) and isinstance(num_items, int | float) and num_items > 0:
        first = _list(schema, "prefixItems")
        yield from first[: int(min(num_items, len(first)))]
        yield from [schema.get("items")] * (num_items > len(first))


def _list(schema: dict[str, Any], name: str) -> list[Any]:
    return value if isinstance(value := schema.get(name), list) else []
