"""The root of the repository, and what tests keep between runs."""

import os
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
TEST_CACHE = Path(os.environ.get("TGIS_TEST_CACHE", REPOSITORY / ".cache")).absolute()  # CI sets the variable
