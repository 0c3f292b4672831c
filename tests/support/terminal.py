"""A command on a terminal."""

import contextlib
import os
import subprocess
import sys


def tgis_on_terminal(*argv: str) -> str:
    """What `tgis` writes to its terminal; stdin is empty."""
    ours, theirs = os.openpty()
    written = b""
    command = [sys.executable, "-m", "tgis", *argv]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        with contextlib.suppress(OSError):  # nobody has the terminal open any more
            while data := os.read(ours, 4096):
                written += data
        assert process.wait(20) == 0
    os.close(ours)
    return written.decode()
