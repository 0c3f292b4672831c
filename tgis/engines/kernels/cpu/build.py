"""Kernels in C for the CPU: sources beside this module, compiled for the processor at hand when an engine starts.

They run in the OpenMP threads of PyTorch. Without a C compiler nothing is lost but speed.
"""

import ctypes
import logging
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

log = logging.getLogger(__name__)

_SECONDS = 60.0  # for the compiler


@cache
def library(source: str, **macros: int) -> ctypes.CDLL | None:
    """What the file of that name gives with these macros; None, with a log line, where it cannot be compiled."""
    compiler = shutil.which("cc")
    if compiler is None:
        log.info("no C compiler (cc): what %s computes is plain PyTorch, which is slower", source)
        return None
    try:
        with tempfile.TemporaryDirectory() as directory:
            return ctypes.CDLL(str(_compile(compiler, source, macros, Path(directory))))
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("%s could not be compiled, plain PyTorch is slower: %s", source, error)
        return None


def _compile(compiler: str, source: str, macros: dict[str, int], directory: Path) -> Path:
    """The library. OpenMP is not linked to it: it must be the one of PyTorch, which is there already."""
    definitions = [f"-D{name.upper()}={value}" for name, value in macros.items()]
    flags = ["-O3", "-march=native", "-fopenmp", "-fPIC", *definitions]
    compiled, linked = directory / "kernel.o", directory / "kernel.so"
    commands: tuple[list[str | Path], ...] = (
        [compiler, *flags, "-c", Path(__file__).with_name(source), "-o", compiled],
        [compiler, "-shared", compiled, "-lm", "-o", linked],
    )
    for command in commands:
        subprocess.run(command, check=True, capture_output=True, timeout=_SECONDS, stdin=subprocess.DEVNULL)
    return linked
