"""The root of the repository, and what tests keep between runs."""

import os
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
sys.path.append(str(REPOSITORY))  # the package `demo` is not installed: for scripts that are run from this folder
TEST_CACHE = Path(os.environ.get("TGIS_TEST_CACHE", REPOSITORY / ".cache")).absolute()  # CI sets the variable
