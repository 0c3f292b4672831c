"""Validates outputs with jsonschema."""

import json
from fractions import Fraction
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError
from jsonschema.validators import validator_for
from referencing import Registry

_MAX_EXPONENT = 1000  # larger exact numbers would fill the memory

FORMATS = Draft202012Validator.FORMAT_CHECKER


def problem_of(text: str, schema: Any) -> str:
    """Why a text is not JSON or does not validate, formats included; empty if it does.

    Numbers are decimals, not floats: as a float, 0.2022 is not a multiple of 0.0001.
    """
    schema = _parse(json.dumps(schema))
    validator = validator_for(schema, Draft202012Validator)(schema, registry=Registry(), format_checker=FORMATS)
    try:
        validator.validate(_parse(text))
    except (ValidationError, ValueError) as error:
        return str(error).partition("\n")[0]
    return ""


def _parse(text: str) -> Any:
    return json.loads(text, parse_float=_number, parse_constant=_no_number)


def _number(text: str) -> Fraction | float:
    exponent = int(text.lower().partition("e")[2] or 0)
    return Fraction(text) if abs(exponent) <= _MAX_EXPONENT else float(text)


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
