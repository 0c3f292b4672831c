"""What differs from the defaults in the parameters that an API makes, as tables write it."""

from enum import StrEnum
from typing import Any

import msgspec

from tgis.frontend.params import Params
from tgis.ipc.lookups import GrammarSpec
from tgis.ipc.request import LogprobOptions, SamplingParams


def described(params: Params, *ignored: str) -> dict[str, Any]:
    """The parameters that are not at their defaults, without those that an API always sets."""
    given = _differences(params, Params()) | _differences(params.sampling, SamplingParams())
    kept = {name: value for name, value in given.items() if name not in ("sampling", "constraints", *ignored)}
    return {name: plain(value) for name, value in kept.items() if value != []}


def plain(value: Any) -> Any:
    """As YAML has it."""
    if isinstance(value, GrammarSpec):
        fields = {"kind": value.kind} | _differences(value, GrammarSpec(value.kind))
        return {name: plain(field) for name, field in fields.items()}
    if isinstance(value, LogprobOptions):
        return _differences(value, LogprobOptions())
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, StrEnum) else value


def _differences(struct: msgspec.Struct, default: msgspec.Struct) -> dict[str, Any]:
    values = {name: getattr(struct, name) for name in struct.__struct_fields__}
    return {name: value for name, value in values.items() if value != getattr(default, name)}
