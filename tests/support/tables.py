"""Tables of `tests/golden/apis`: what an API reads and writes, and what is read of a model, row by row."""

import json
from typing import Any

import pytest
import yaml
from repository import REPOSITORY

from tgis import errors
from tgis.api.http.errors import HttpError
from tgis.api.openai.template_process import TemplateError


def table(file: str, name: str) -> pytest.MarkDecorator:
    """A table of a file, for tests with the parameter `row`; rows without names have that of their first value."""
    rows = read_table(file, name)
    named = rows if isinstance(rows, dict) else {}
    ids = [*named] or [json.dumps(next(iter(row.values())))[:60] for row in rows]
    return pytest.mark.parametrize("row", [*named.values()] or rows, ids=ids)


def read_table(file: str, name: str) -> Any:
    """The rows as they are."""
    return yaml.safe_load((REPOSITORY / "tests/golden/apis" / f"{file}.yaml").read_text())[name]


def error(row: dict[str, Any]) -> errors.RequestError:
    """The error of a row: a class and its arguments."""
    name, *arguments = row["error"]
    kinds: dict[str, Any] = vars(errors) | {"HttpError": HttpError, "TemplateError": TemplateError}
    made: errors.RequestError = kinds[name](*arguments)
    return made
