"""Compiles the C kernels, one library for each instruction set.

Imports the standard library only: setup.py runs this file where nothing is installed.
"""

import hashlib
import os
import platform
import subprocess
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

_SOURCE_DIR = Path(__file__).parent / "csrc"
_SOURCES = (
    "argmax.c",
    "attention.c",
    "collectives.c",
    "dequantizing_gemm.c",
    "elementwise.c",
    "experts.c",
    "gemm.c",
    "gemm_amx.c",
    "gumbel_max.c",
    "kv_cache.c",
    "quantized_gemm.c",
    "recurrent.c",
    "replay.c",
)
_F32, _BF16 = "-DBF16=0", "-DBF16=1"  # the functions of each source, by dtype
_WEIGHTS = (f"{_F32} -DBY_BF16", f"{_F32} -DBY_F16")  # gemm.c for weights in 16 bits beside float32
_FLAGS = ("-O3", "-fopenmp", "-fPIC", "-Wno-psabi")
_TIMEOUT_SECONDS = 300.0

_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl")
# What a library uses of the CPU, in the names of /proc/cpuinfo; by architecture.
EXTENSIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "generic": (),
        "avx2": _AVX2,
        "avx2_vnni": (*_AVX2, "avx_vnni"),
        "avx512": _AVX512,
        "avx512_vnni": (*_AVX512, "avx512_vnni"),
        "avx512_bf16": (*_AVX512, "avx512_vnni", "avx512_bf16"),  # no CPU has the last without the other
    },
    "aarch64": {
        "generic": (),
        "neon_dotprod": ("asimddp",),
        "neon_bf16": ("asimddp", "i8mm", "bf16"),  # Armv8.6 has all of them
    },
}


def isa_flags() -> dict[str, tuple[str, ...]]:
    """The libraries of this machine's architecture and the compiler flags of each."""
    machine = platform.machine()
    return {isa: _flags(machine, names) for isa, names in EXTENSIONS.get(machine, {"generic": ()}).items()}


def _flags(machine: str, extensions: tuple[str, ...]) -> tuple[str, ...]:
    if machine == "aarch64":
        return ("+".join(("-march=armv8.2-a", *extensions)).replace("asimddp", "dotprod"),) if extensions else ()
    return tuple(f"-m{name.replace('_', '')}" for name in extensions)


def source_files() -> list[Path]:
    """The sources of the libraries; empty in an installed wheel."""
    return sorted(_SOURCE_DIR.glob("*.[ch]"))


def source_hash(isa: str) -> str:
    """Changes when the library has to be compiled anew."""
    digest = hashlib.sha256(repr((platform.machine(), _FLAGS, isa_flags()[isa])).encode())
    for file in source_files():
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def compile_library(isa: str, compiler: str, directory: Path, more_flags: tuple[str, ...] = ()) -> Path:
    """Compile the library and its object files in `directory`; OSError or TimeoutExpired if that fails.

    OpenMP is not linked: its functions must be those of the library that PyTorch has loaded.
    """

    def compile_object(source: str, macros: str) -> Path:
        target = directory / f"{isa}-{source}{macros}.o"
        flags = *_FLAGS, *isa_flags()[isa], *more_flags, *macros.split()
        _run(compiler, *flags, "-c", str(_SOURCE_DIR / source), "-o", str(target))
        return target

    jobs = [*product(_SOURCES, (_F32, _BF16)), *product(("gemm.c",), _WEIGHTS)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_object, *zip(*jobs, strict=True)))
    library = directory / f"{isa}.so"
    _run(compiler, *more_flags, "-shared", *map(str, objects), "-lm", "-o", str(library))
    return library


def _run(*command: str) -> None:
    """Run a compiler, and once more if it fails: others may have taken the memory or the disk for a while."""
    for _ in range(2):
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False
        )
        if not done.returncode:
            return
    errors = [line for line in done.stderr.splitlines() if "error" in line] or [f"exit code {done.returncode}"]
    raise OSError(f"{command[0]}: {errors[0]}")
