"""The C kernels of this process: one library, chosen by the instruction set of the CPU.

A wheel brings a library for each instruction set. An editable install has sources instead, and compiles what it needs
into CACHE_DIR when an engine starts.
"""

import ctypes
import logging
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tgis.engines.kernels.cpu import build
from tgis.errors import StartError
from tgis.utils.file_lock import locked
from tgis.utils.private_directory import refusal_of

log = logging.getLogger(__name__)

_HERE = Path(__file__).parent
_CPUINFO = Path("/proc/cpuinfo")
_SUFFIXES = {torch.float32: "f32", torch.bfloat16: "bf16"}  # suffixes of function names
DTYPES = tuple(_SUFFIXES)

# The values of CPU_ISA and the flags of /proc/cpuinfo that they need; the last that a CPU supports is the best.
ISAS = {isa: frozenset(names) for libraries in build.EXTENSIONS.values() for isa, names in libraries.items()}
ISAS["amx"] = ISAS["avx512_bf16"] | {"amx_tile", "amx_bf16", "amx_int8"}  # no CPU has one of them without the others

# Called before every call of a kernel, with the ctypes function and the arguments; whether it replaces the call.
call_recorder: ContextVar[Callable[[Any, tuple[Any, ...]], bool] | None] = ContextVar("call_recorder", default=None)


POINTER, INTEGER, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


def structure(*fields: tuple[str, Any]) -> Any:
    """A class for a structure in C, from names of fields, separated by spaces, with their type."""
    typed = [(name, kind) for names, kind in fields for name in names.split()]
    return type("Structure", (ctypes.Structure,), {"_fields_": typed})


@dataclass(frozen=True, slots=True)
class CpuKernels:
    """The functions of the library."""

    isa: str
    _library: ctypes.CDLL

    @property
    def library_isa(self) -> str:
        """The instruction set of the library: that for AVX512-BF16 also has the function for AMX."""
        return _library_isa(self.isa)

    def function(self, name: str, dtype: torch.dtype, argtypes: list[Any], restype: Any = None) -> Callable[..., Any]:
        """The function of this name for a dtype. It takes nothing but pointers and integers of 64 bits, so that calls
        can be replayed, and returns nothing or, as an integer, whether it failed.
        """
        function = self._library[f"{name}_{_SUFFIXES[dtype]}"]
        function.argtypes, function.restype = argtypes, restype
        return _recordable(function)

    def address(self, name: str, dtype: torch.dtype) -> int:
        """The address of a function of this name for a dtype, which other functions call."""
        return ctypes.cast(self._library[f"{name}_{_SUFFIXES[dtype]}"], ctypes.c_void_p).value or 0

    def functions(self, name: str, argtypes: list[Any], restype: Any = None) -> dict[torch.dtype, Callable[..., Any]]:
        """The function of this name for each dtype."""
        return {dtype: self.function(name, dtype, argtypes, restype) for dtype in DTYPES}


def _recordable(function: Any) -> Callable[..., Any]:
    """A function of the library whose calls can be recorded."""

    def call(*arguments: Any) -> Any:
        record = call_recorder.get()
        if record is not None and record(function, arguments):
            return 0
        return function(*arguments)

    return call


@cache
def load_kernels(cpu_isa: str, cache_dir: str) -> CpuKernels | None:
    """The kernels that CPU_ISA names; None, with a line in the log, if that is `none` or they cannot be loaded.

    StartError if the CPU cannot execute them.
    """
    isa = resolve_isa(cpu_isa, cpu_flags())
    if isa == "none":
        log.info("CPU kernels: none")
        return None
    name = _library_isa(isa)
    path = _HERE / f"{name}.so"
    try:
        if not path.exists():
            path = _compiled(name, cache_dir)
        library = ctypes.CDLL(str(path))
    except (OSError, subprocess.TimeoutExpired) as error:
        log.warning("no CPU kernels, plain PyTorch is slower: %s", error)
        return None
    if isa == "amx" and not library.request_amx_bf16():
        log.warning("CPU kernels: the system lets no process use AMX")
        isa = name
    log.info("CPU kernels: %s (%s)", isa, path)
    return CpuKernels(isa, library)


def _library_isa(isa: str) -> str:
    return "avx512_bf16" if isa == "amx" else isa


def resolve_isa(cpu_isa: str, flags: frozenset[str]) -> str:
    """The instruction set that CPU_ISA means on a CPU with these flags."""
    if cpu_isa == "auto":
        return [isa for isa, needed in ISAS.items() if needed <= flags][-1]
    if cpu_isa != "none" and (missing := ISAS[cpu_isa] - flags):
        raise StartError(f"CPU_ISA={cpu_isa}: this CPU lacks {', '.join(sorted(missing))}")
    return cpu_isa


def computes_in_bf16(cpu_isa: str) -> bool:
    """Whether what CPU_ISA names multiplies in bfloat16; with `none` PyTorch does, as the CPU does."""
    isa = resolve_isa("auto" if cpu_isa == "none" else cpu_isa, cpu_flags())
    return not ISAS[isa].isdisjoint({"avx512_bf16", "bf16"})


def cpu_flags(cpuinfo: Path = _CPUINFO) -> frozenset[str]:
    """Instruction set extensions that both the CPU and the operating system support, as Linux calls them."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return frozenset()
    flags = (line.partition(":")[2] for line in lines if line.partition("\t")[0].strip() in ("flags", "Features"))
    return frozenset(next(flags, "").split())


def _compiled(isa: str, cache_dir: str) -> Path:
    """The library in CACHE_DIR, compiled if no start before this one has done that."""
    if not build.source_files() or not cache_dir:
        raise FileNotFoundError(f"no library for {isa}, and nothing to compile one from")
    directory = Path(cache_dir, "kernels")
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_trusted(directory)
    path = directory / f"{isa}-{build.source_hash(isa)}.so"
    with locked(directory / "lock"):
        if not path.exists():
            _compile(isa, path)
    _check_trusted(path)
    return path


def _compile(isa: str, path: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        raise FileNotFoundError("no C compiler (cc)")
    log.info("compiling CPU kernels for %s, about a minute, once for all starts with %s", isa, path.parent)
    # Not every file system has locks: another process may do the same, in a directory with another name.
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        made = build.compile_library(isa, compiler, Path(scratch))
        made.chmod(0o500)
        made.replace(path)


def _check_trusted(path: Path) -> None:
    """Raise PermissionError if others could write there: code is loaded from it."""
    if refusal := refusal_of(path):
        raise PermissionError(refusal)
