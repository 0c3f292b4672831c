"""Engines for the tests of this folder."""

from pathlib import Path

import pytest
from adapter_batches import ENGINES, EngineSetup, make_setup


@pytest.fixture(scope="package", params=ENGINES)
def setup(request: pytest.FixtureRequest, glassllm_dir: Path) -> EngineSetup:
    return make_setup(request.param, glassllm_dir)


@pytest.fixture(scope="package")
def titles(titles_dir: Path) -> EngineSetup:
    return make_setup("padded", titles_dir)
