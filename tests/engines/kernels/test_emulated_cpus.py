"""The kernels on CPUs that are not at hand, most of which QEMU emulates: right, and the same bits as on this one."""

import platform
import shutil
import subprocess
from pathlib import Path

import pytest
from cpu_kernels import kernels_of
from repository import REPOSITORY

from tgis.engines.kernels.cpu.build import compile_library
from tgis.engines.kernels.cpu.library import ISAS, cpu_flags

SOURCES = REPOSITORY / "tgis" / "engines" / "kernels" / "cpu" / "csrc"
HARNESSES = REPOSITORY / "tests" / "support"
ARM = "aarch64-linux-gnu"
WITHOUT_FMA = "bf16", "bf16 gemm", "f32 quantized_gemm", "bf16 quantized_gemm"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


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
