"""The root of the repository, what tests keep between runs, and Python processes of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
sys.path.append(str(REPOSITORY))  # the package `demo` is not installed: for scripts that are run from this folder
TEST_CACHE = Path(os.environ.get("TGIS_TEST_CACHE", REPOSITORY / ".cache")).absolute()  # CI sets the variable


def python_path(*first: Path) -> str:
    """These directories, and what PYTHONPATH has: on a GPU machine our packages."""
    return os.pathsep.join(filter(None, [*map(str, first), os.environ.get("PYTHONPATH")]))


def run_python(*arguments: str | Path, **variables: str) -> Any:
    """The last line, from JSON, that `python ARGUMENTS...` prints."""
    environment = os.environ | {"PYTHONPATH": python_path(REPOSITORY)} | variables
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])
