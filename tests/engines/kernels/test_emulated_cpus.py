"""The GEMM on CPUs that are not at hand, which QEMU emulates: right, and the same bits as on this one."""

import platform
import shutil
import subprocess
from pathlib import Path

import pytest
from cpu_kernels import kernels_of
from repository import REPOSITORY

from tgis.engines.kernels.cpu.build import isa_flags

KERNELS = REPOSITORY / "tgis" / "engines" / "kernels" / "cpu" / "csrc"
HARNESS = REPOSITORY / "tests" / "support" / "gemm_harness.c"

pytestmark = pytest.mark.slow


def tool(name: str) -> str:
    """The path of a program; skips the test where it is missing."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"no {name}")
    return path


def hashes(directory: Path, compiler: str, flags: tuple[str, ...], *emulator: str) -> dict[str, str]:
    """What the harness prints: for each dtype, a hash of its outputs."""
    objects = [directory / f"{bf16}.o" for bf16 in (0, 1)]
    for bf16, made in enumerate(objects):
        source = str(KERNELS / "gemm.c")
        command = [tool(compiler), "-O3", "-Wno-psabi", *flags, f"-DBF16={bf16}", "-c", source, "-o", str(made)]
        subprocess.run(command, check=True)
    program = directory / "harness"
    subprocess.run([compiler, "-O2", "-static", HARNESS, *objects, "-lm", "-o", program], check=True)
    done = subprocess.run([*emulator, program], stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, done.stdout
    return dict(line.split() for line in done.stdout.splitlines())


@pytest.fixture
def expected(tmp_path: Path) -> dict[str, str]:
    """On this CPU, with fused multiply-add."""
    if platform.machine() != "x86_64":
        return hashes(tmp_path, "cc", ())
    kernels_of("avx2")
    return hashes(tmp_path, "cc", isa_flags()["avx2"])


def test_arm(tmp_path: Path, expected: dict[str, str]) -> None:
    assert hashes(tmp_path, "aarch64-linux-gnu-gcc", (), tool("qemu-aarch64")) == expected


@pytest.mark.parametrize(("isa", "cpu"), [("avx2", "Haswell"), ("generic", "qemu64")])
def test_x86_64(tmp_path: Path, expected: dict[str, str], isa: str, cpu: str) -> None:
    if platform.machine() != "x86_64":
        pytest.skip("cc compiles for another architecture")
    found = hashes(tmp_path, "cc", isa_flags()[isa], tool("qemu-x86_64"), "-cpu", cpu)
    assert found["bf16"] == expected["bf16"]  # whose products are exact: not fusing them is the same
    if isa == "avx2":
        assert found == expected
