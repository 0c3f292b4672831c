"""Checks and rewrites JSON schemas before they are compiled.

llguidance refuses the keywords that it does not implement, by name, and ignores unknown ones, as the standard says. The
checks refuse schemas that would take too long. Keywords that llguidance enforces only roughly are rewritten.
"""

import json
import math
from collections.abc import Callable, Iterator
from decimal import Decimal, InvalidOperation
from math import lcm
from typing import Any
from urllib.parse import unquote

from tgis.errors import GrammarError
from tgis.ipc.lookups import MAX_GRAMMAR_DEPTH, MAX_GRAMMAR_REPETITIONS
from tgis.structured_output.inferred_types import with_type
from tgis.structured_output.one_of import OneOfChecker

_Check = Callable[[dict[str, Any], str], object]  # checks a schema at a place

_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_EXCLUSIVE = (("exclusiveMinimum", "minimum", max, 1e-9), ("exclusiveMaximum", "maximum", min, -1e-9))
_OF_VALUES = (*_COUNTS, "pattern", "format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_MAX_BOUND = 2**63 - 1024  # the largest of int64 that is a float
_MAX_MULTIPLE = 20_000  # the automaton has a state for each remainder
OPTIONS_KEYWORD = "x-guidance"  # options of llguidance's compiler, not for clients
_VALUES = ("const", "enum", "default", "examples")
_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
# Keywords that llguidance refuses although they always hold; libraries write them.
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "propertyNames": (True, {}, {"type": "string"}),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
}
# llguidance allows a 29th of February every year, host names of any length, and leap seconds at any minute, which
# neither Python nor jsonschema reads.
_YEAR = "([0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_MULTIPLE_OF_4 = "(0[48]|[2468][048]|[13579][26])"
_LEAP_YEAR = f"([0-9]{{2}}{_MULTIPLE_OF_4}|{_MULTIPLE_OF_4}00)"
_DAY = "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
_DATE = f"({_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
_HOUR_AND_MINUTE = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR_AND_MINUTE}:[0-5][0-9](\.[0-9]+)?([Zz]|[+-]{_HOUR_AND_MINUTE})"
_EXACT = {
    "date": {"pattern": f"^{_DATE}$"},
    "time": {"pattern": f"^{_TIME}$"},
    "date-time": {"pattern": f"^{_DATE}[Tt]{_TIME}$"},
    "hostname": {"format": "hostname", "maxLength": 253},
}


def parse_schema(text: str, *, exact: bool = True, rough: bool = False) -> dict[str, Any]:
    """A JSON schema that is safe to compile; GrammarError. If it is not `exact`, a `oneOf` allows what validates with
    several of its schemas; if it is `rough`, texts and numbers may be any.
    """
    schema = _parse(text)
    if not isinstance(schema, dict | bool):
        raise GrammarError("a JSON schema is an object or a boolean")
    members = [member for member in _keywords(schema) if not rough or member[0] not in _OF_VALUES]
    _check_values(members)
    if isinstance(schema, bool):
        return {} if schema else {"enum": []}
    plain = json.loads(text)
    if rough:
        _rewritten(plain, lambda part, _: [part.pop(name, None) for name in _OF_VALUES], "#")
    num_ids = sum(name == "$id" for name, _ in members)
    # An inner $id changes the meaning of references.
    checker = OneOfChecker(plain, resolve=num_ids == ("$id" in plain))
    rewritten: dict[str, Any] = _rewritten(plain, checker.check if exact else lambda *_: None, "#")
    return rewritten


def _keywords(schema: Any) -> list[tuple[str, Any]]:
    """The members of all schemas; those of values such as defaults, too, if a reference may lead there."""
    members, schemas = list(_members(schema)), list[dict[str, Any]]()
    references = [unquote(value) for name, value in members if isinstance(value, str) and name.lower().endswith("ref")]
    if any(f"/{name}" in reference for reference in references for name in _VALUES):
        return members
    _rewritten(schema, lambda part, _: schemas.append(part), "#")
    return [member for part in schemas for member in part.items()]


def _check_values(members: list[tuple[str, Any]]) -> None:
    multiple = 1
    for name, value in members:
        if name == OPTIONS_KEYWORD:
            raise GrammarError(f"unsupported keyword {name}")
        if name in _COUNTS and isinstance(value, int | Decimal) and value > MAX_GRAMMAR_REPETITIONS:
            raise GrammarError(f"{name} {value} is more than {MAX_GRAMMAR_REPETITIONS}")
        if name == "multipleOf" and isinstance(value, int | Decimal) and value > 0:
            multiple = lcm(multiple, _coefficient(value))
    if multiple > _MAX_MULTIPLE:
        raise GrammarError(f"multipleOf: the common multiple of all values is more than {_MAX_MULTIPLE}")


def _rewritten(schema: Any, check: _Check, place: str) -> Any:
    """A copy in which every schema, which must pass the check, says what it means in keywords of llguidance."""
    if isinstance(schema, list):
        return [_rewritten(item, check, f"{place}/{index}") for index, item in enumerate(schema)]
    if not isinstance(schema, dict):
        return schema
    check(schema, place)
    kept = {name: value for name, value in schema.items() if value not in _WITHOUT_EFFECT.get(name, ())}
    changed = {name: _rewritten_member(name, value, check, f"{place}/{name}") for name, value in kept.items()}
    return _with_exact_format(_with_inner_bounds(_with_int64_bounds(with_type(_check_num_properties(changed)))))


def _rewritten_member(name: str, value: Any, check: _Check, place: str) -> Any:
    if name in _VALUES:
        return value
    if name in _SCHEMAS_BY_NAME and isinstance(value, dict):
        return {key: _rewritten(schema, check, f"{place}/{key}") for key, schema in value.items()}
    return _rewritten(value, check, place)


def _parse(text: str) -> Any:
    try:
        return json.loads(text, parse_float=_number, parse_int=_number, parse_constant=_no_number)
    except RecursionError:
        raise GrammarError(f"nested more than {MAX_GRAMMAR_DEPTH} levels deep") from None
    except ValueError as error:
        raise GrammarError(f"not JSON: {error}") from None


def _number(text: str) -> Decimal:
    try:
        number = Decimal(text)
    except InvalidOperation:  # an exponent of more than 18 digits
        number = None
    if number is None or math.isinf(float(text)):
        raise GrammarError("a number has too large an exponent")
    return number


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _coefficient(value: int | Decimal) -> int:
    """The digits of a number without the decimal point; a number above the limit for one that is too long."""
    digits, exponent = Decimal(value).normalize().as_tuple()[1:]
    assert isinstance(exponent, int)
    if exponent > len(str(_MAX_MULTIPLE)):
        return _MAX_MULTIPLE + 1
    coefficient: int = int("".join(map(str, digits))) * 10 ** max(exponent, 0)
    return coefficient


def _members(schema: Any) -> Iterator[tuple[str, Any]]:
    """Every name and value anywhere in a JSON value."""
    values = [(schema, 1)]
    while values:
        value, depth = values.pop()
        if depth > MAX_GRAMMAR_DEPTH:
            raise GrammarError(f"nested more than {MAX_GRAMMAR_DEPTH} levels deep")
        if isinstance(value, dict):
            yield from value.items()
            values += [(member, depth + 1) for member in value.values()]
        elif isinstance(value, list):
            values += [(item, depth + 1) for item in value]


def _with_exact_format(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with an exact pattern or length for its format."""
    if not (exact := _EXACT.get(str(schema.get("format")))) or not isinstance(schema.get("allOf", []), list):
        return schema
    rest = {name: value for name, value in schema.items() if name != "format"}
    return rest | {"allOf": [*schema.get("allOf", []), exact]}


def _with_int64_bounds(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with bounds that llguidance knows; upper ones of integers may have any size."""
    changed = dict(schema)
    for exclusive, inclusive, best, step in _EXCLUSIVE:
        for name in (exclusive, inclusive) if schema.get("type") != "integer" or step > 0 else ():
            if isinstance(bound := schema.get(name), int | float):
                changed[name] = best(bound, -_MAX_BOUND if step > 0 else _MAX_BOUND)
    return changed


def _with_inner_bounds(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with inclusive bounds a bit further in: llguidance may allow an exclusive bound that is an integer."""
    changed = dict(schema)
    for name, inner, best, step in _EXCLUSIVE if schema.get("type") != "integer" else ():
        bound, other = schema.get(name), schema.get(inner)
        if isinstance(bound, int | float) and bound == int(bound) and bound + step != bound:
            changed[inner] = best(bound + step, other if isinstance(other, int | float) else bound + step)
            del changed[name]
    return changed


def _check_num_properties(schema: dict[str, Any]) -> dict[str, Any]:
    """GrammarError if minProperties may be missed: names outside `required` may come twice, and then count once."""
    least, required = schema.get("minProperties"), schema.get("required")
    most = 1 + (len(required) if isinstance(required, list) else 0)
    if isinstance(least, int | float) and least > most:
        raise GrammarError(f"minProperties {least} is more than {most}, the number of required names and one more")
    return schema
