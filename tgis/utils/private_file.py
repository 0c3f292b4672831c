"""Files that their owner alone can read."""

import os
from pathlib import Path


def append_line(path: Path, line: str) -> int:
    """Append a line to a file, made if it is missing, and return the size of the file."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "w", encoding="utf-8") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(f"{line}\n")
        return file.tell()
