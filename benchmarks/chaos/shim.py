"""Compiles and controls the library that is preloaded into the server."""

import mmap
import os
import struct
import subprocess
from enum import IntEnum
from pathlib import Path


class Control(IntEnum):
    """What the library can distort, as the index of the number in the shared page."""

    CLOCK_OFFSET = 0  # seconds added to the time of day
    OPEN_DELAY_MS = 1  # delay of opening a file
    LOG_FULL = 2  # no space left for the log


class Shim:
    """A clock, a disk and a log that misbehave on request."""

    def __init__(self, directory: Path) -> None:
        """Compile the library; files below `directory` count as its disk."""
        library, page = directory / "shim.so", directory / "control"
        source = Path(__file__).with_suffix(".c")
        command = ("cc", "-O2", "-shared", "-fPIC", str(source), "-o", str(library), "-ldl")
        subprocess.run(command, check=True)
        page.write_bytes(bytes(8 * len(Control)))
        with page.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), 0)
        preloaded = ":".join(filter(None, (str(library), os.environ.get("LD_PRELOAD"))))
        self.environment = {
            "LD_PRELOAD": preloaded,
            "CHAOS_CONTROL": str(page),
            "CHAOS_DIRECTORY": str(directory),
        }

    def set(self, control: Control, value: int) -> None:
        struct.pack_into("q", self._page, 8 * control, value)
