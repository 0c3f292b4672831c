"""Formats of strings that llguidance enforces only roughly: it allows a 29th of February every year, leap seconds at
any minute and host names of any length.

Here they are what validators accept, and no leap seconds, which neither Python nor jsonschema reads.
"""

from typing import Any

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


def with_exact_format(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with what is exact in the place of its own format."""
    if not (exact := _EXACT.get(str(schema.get("format")))) or not isinstance(schema.get("allOf", []), list):
        return schema
    rest = {name: value for name, value in schema.items() if name != "format"}
    return rest | {"allOf": [*schema.get("allOf", []), exact]}
