"""What jsonschema says about an output."""

import json
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError
from jsonschema.validators import validator_for
from jsonschema_specifications import REGISTRY

FORMATS = Draft202012Validator.FORMAT_CHECKER


def problem_of(text: str, schema: Any) -> str:
    """Why a text is no JSON, or does not validate; empty if it does, formats included."""
    validator = validator_for(schema, Draft202012Validator)(schema, registry=REGISTRY, format_checker=FORMATS)
    try:
        validator.validate(json.loads(text, parse_constant=_no_number))
    except (ValidationError, ValueError) as error:
        return str(error).partition("\n")[0]
    return ""


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
