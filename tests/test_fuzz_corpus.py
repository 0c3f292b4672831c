"""The inputs that `make fuzz` began with, and all that ever failed."""

from pathlib import Path

import pytest
from fuzz_targets import TARGETS
from repository import REPOSITORY

INPUTS = sorted((REPOSITORY / "tests" / "fuzz_corpus").glob("*/*"))


@pytest.mark.parametrize("path", INPUTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_hostile_bytes_are_read_or_refused(path: Path) -> None:
    TARGETS[path.parent.name](path.read_bytes())


def test_every_reader_has_inputs() -> None:
    assert {path.parent.name for path in INPUTS} == TARGETS.keys()
