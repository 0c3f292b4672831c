"""Parameters of which only some run in `make test`."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_except(fast: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """The values as parameters, all but these marked slow."""
    return [value if value in fast else pytest.param(value, marks=pytest.mark.slow) for value in values]
