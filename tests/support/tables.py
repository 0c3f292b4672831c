"""Tables of `tests/golden/apis`: what an API reads and writes, row by row."""

import json

import pytest
import yaml
from repository import REPOSITORY


def table(file: str, name: str) -> pytest.MarkDecorator:
    """A table of a file, for tests with the parameter `row`; rows without names have that of their first value."""
    tables = yaml.safe_load((REPOSITORY / "tests/golden/apis" / f"{file}.yaml").read_text())
    rows = tables[name]
    named = rows if isinstance(rows, dict) else {}
    ids = [*named] or [json.dumps(next(iter(row.values())))[:60] for row in rows]
    return pytest.mark.parametrize("row", [*named.values()] or rows, ids=ids)
