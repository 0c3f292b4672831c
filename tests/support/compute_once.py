"""Expected values that take minutes to compute: made once, by a child process, and kept in the test cache."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tgis.utils.file_lock import locked

QUIET = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "PYTHONWARNINGS": "ignore"}


def compute_once(path: Path, *arguments: str | Path, environment: Mapping[str, str] = QUIET) -> Path:
    """`path`, a file or directory that `python ARGUMENTS... PATH` makes; other test processes wait for it."""
    with locked(path.parent / f".{path.name}.lock"):
        if not path.exists():
            unfinished = path.parent / f".{path.name}.{os.getpid()}"
            command = [sys.executable, *arguments, unfinished]
            subprocess.run(command, check=True, env=os.environ | environment, stdout=subprocess.DEVNULL)
            unfinished.replace(path)
    return path
