"""The kernels on CPUs that are not at hand, most of which QEMU emulates: right, and the same bits as on this one; and
the tests of the C kernels under AddressSanitizer and UndefinedBehaviorSanitizer, for every instruction set.
"""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cpu_kernels import kernels_of
from repository import REPOSITORY, python_path

from tgis.engines.kernels.cpu.build import compile_library, isa_flags, source_hash
from tgis.engines.kernels.cpu.library import ISAS, cpu_flags

SOURCES = REPOSITORY / "tgis" / "engines" / "kernels" / "cpu" / "csrc"
HARNESSES = REPOSITORY / "tests" / "support"
ARM = "aarch64-linux-gnu"
WITHOUT_FMA = "bf16", "bf16 gemm", "f32 quantized_gemm", "bf16 quantized_gemm"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def tool(name: str) -> str:
    """The path of a program; skips the test where it is missing."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"no {name}")
    return path


def library_here(isa: str) -> Path:
    """The library of this CPU; skips the test where it has none."""
    if platform.machine() != "x86_64":
        pytest.skip("cc compiles for another architecture")
    return Path(kernels_of(isa)._library._name)


def hashes(library: Path, directory: Path, compiler: str, *emulator: str) -> dict[str, str]:
    """What the harnesses print: hashes of the outputs, by dtype and kernel."""
    printed: dict[str, str] = {}
    for source, dtype, bf16 in (("gemm", "", 0), ("kernels", "f32 ", 0), ("kernels", "bf16 ", 1)):
        program = directory / "harness"
        flags = "-O2", "-Wno-psabi", f"-DBF16={bf16}", f"-I{SOURCES}"
        files = str(HARNESSES / f"{source}_harness.c"), str(library)
        subprocess.run([tool(compiler), *flags, *files, "-fopenmp", "-lm", "-o", program], check=True)
        done = subprocess.run([*emulator, program], stdout=subprocess.PIPE, text=True, check=False)
        assert done.returncode == 0, done.stdout
        printed |= {dtype + name: value for name, value in map(str.split, done.stdout.splitlines())}
    return printed


@pytest.mark.parametrize(
    ("isa", "cpu", "like"),
    [
        ("generic", "cortex-a72", "avx2"),
        ("neon_dotprod", "neoverse-n1", "avx2"),
        ("neon_bf16", "max", "avx512_bf16"),  # both round the weights of attention to bfloat16
    ],
)
def test_arm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, isa: str, cpu: str, like: str) -> None:
    compiler, emulator = tool(f"{ARM}-gcc"), tool("qemu-aarch64")
    expected = hashes(library_here(like), tmp_path, "cc")
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    library = compile_library(isa, compiler, tmp_path)
    assert hashes(library, tmp_path, compiler, emulator, "-L", f"/usr/{ARM}", "-cpu", cpu) == expected


@pytest.mark.parametrize(("isa", "cpu"), [("avx2", "Haswell"), ("generic", "qemu64")])
def test_x86_64(tmp_path: Path, isa: str, cpu: str) -> None:
    emulator, expected = tool("qemu-x86_64"), hashes(library_here("avx2"), tmp_path, "cc")
    printed = hashes(library_here(isa), tmp_path, "cc", emulator, "-cpu", cpu)
    names = expected if isa == "avx2" else WITHOUT_FMA
    assert {name: printed[name] for name in names} == {name: expected[name] for name in names}


def test_avx_vnni(tmp_path: Path) -> None:
    """The same instruction as AVX512-VNNI has in 256 bits, which an assembler gives that one's bytes."""
    if not ISAS["avx512_vnni"] <= cpu_flags():
        pytest.skip("no AVX512-VNNI")
    assembler = tmp_path / "as"
    assembler.write_text('#!/bin/sh\nfor source; do :; done\nsed -i "s/{vex}//" "$source"\nexec as "$@"\n')
    assembler.chmod(0o700)
    library = compile_library("avx2_vnni", "cc", tmp_path, ("-B", str(tmp_path)))
    assert hashes(library, tmp_path, "cc") == hashes(library_here("avx2"), tmp_path, "cc")


SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g", "-O1")
RUNTIMES = ("libasan.so", "libubsan.so", "libstdc++.so.6")  # the last because PyTorch throws exceptions
NAMES = ("collectives", "cpu_attention", "cpu_sampling", "fused_ops", "linear", "quantized", "recording", "recurrent")
FILES = [f"tests/engines/kernels/test_{name}.py" for name in NAMES]
LEFT_OUT = "not amx"  # which is emulated by a handler of signals


def runtime(name: str) -> str:
    """The path of the compiler's library; skips the test if it has none."""
    path = subprocess.run(["cc", f"-print-file-name={name}"], check=True, capture_output=True, text=True).stdout.strip()
    if not Path(path).is_absolute():
        pytest.skip(f"the C compiler has no {name}")
    return path


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A test cache with libraries that check what they access."""
    kernels_of("generic")  # or the test is skipped
    cache = tmp_path_factory.mktemp("cache")
    (cache / "kernels").mkdir(mode=0o700)
    for isa in isa_flags():
        if ISAS[isa] <= cpu_flags():
            library = compile_library(isa, "cc", tmp_path_factory.mktemp(isa), SANITIZE)
            library.rename(cache / "kernels" / f"{isa}-{source_hash(isa)}.so")
    return cache


def test_kernels_stay_in_bounds(cache: Path) -> None:
    environment = os.environ | {
        "LD_PRELOAD": " ".join(map(runtime, RUNTIMES)),
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0",  # Python and PyTorch keep much until the end
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONPATH": python_path(REPOSITORY, REPOSITORY / "tests" / "support"),
        "TGIS_TEST_CACHE": str(cache),
    }
    options = "-q", "--capture=sys", "-p", "no:cacheprovider", "-m", "not slow", "-k", LEFT_OUT
    command = [sys.executable, "-m", "pytest", *options, *FILES]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
