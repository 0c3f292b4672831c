"""Parameters of which only some run in `make test`."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_except(fast: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """All but the fast cases are marked slow; a tuple has the values of several names."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else [case]), marks=[] if case in fast else pytest.mark.slow)
        for case in cases
    ]
