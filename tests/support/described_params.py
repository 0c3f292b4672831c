"""What differs from the defaults in the parameters that an API makes."""

from typing import Any

import msgspec

from tgis.frontend.params import Params
from tgis.ipc.request import SamplingParams


def described(params: Params, *ignored: str) -> dict[str, Any]:
    """The parameters that are not at their defaults, without those that an API always sets."""
    given = _differences(params, Params()) | _differences(params.sampling, SamplingParams())
    kept = {name: value for name, value in given.items() if name not in ("sampling", "constraints", *ignored)}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in kept.items() if value != []}


def _differences(struct: msgspec.Struct, default: msgspec.Struct) -> dict[str, Any]:
    values, defaults = map(msgspec.structs.asdict, (struct, default))
    return {name: value for name, value in values.items() if value != defaults[name]}
