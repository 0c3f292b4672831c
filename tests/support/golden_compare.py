"""Compares protobuf JSON with protobuf JSON: one line with its path for each difference."""

import math
from typing import Any

RELATIVE = 5e-4  # as in TGIS's own suites; float32 on different machines differs by a tenth of it
ABSOLUTE = 1e-6  # for log-probabilities near 0, whose relative error is that of a difference of scores


def differences(expected: Any, got: Any, path: str = "", partly: bool = False) -> list[str]:
    """Floats are equal within the tolerance, everything else exactly; `partly` ignores keys that only `got` has."""
    if isinstance(expected, dict) and isinstance(got, dict):
        names = expected if partly else expected | got
        return [line for name in names for line in _member(expected, got, f"{path}.{name}", name, partly)]
    if isinstance(expected, list) and isinstance(got, list):
        lines = [f"{path}: {len(expected)} expected, {len(got)} came"] if len(expected) != len(got) else []
        for index, (one, other) in enumerate(zip(expected, got, strict=False)):
            lines += differences(one, other, f"{path}[{index}]", partly)
        return lines
    return [] if _equal(expected, got) else [f"{path}: expected {expected!r}, got {got!r}"]


def _member(expected: dict[str, Any], got: dict[str, Any], path: str, name: str, partly: bool) -> list[str]:
    if name not in got:
        return [f"{path}: expected {expected[name]!r}, got none"]
    if name not in expected:
        return [f"{path}: expected none, got {got[name]!r}"]
    return differences(expected[name], got[name], path, partly)


def _equal(expected: Any, got: Any) -> bool:
    if isinstance(expected, float) and isinstance(got, float):
        return math.isclose(expected, got, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
    return type(expected) is type(got) and bool(expected == got)
