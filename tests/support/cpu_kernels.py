"""The C kernels for tests. CPU_ISA masks instruction sets in tests as in a server: `CPU_ISA=avx2 make test`."""

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
import torch
from repository import REPOSITORY, TEST_CACHE

from tgis.engines.kernels.cpu.build import isa_flags
from tgis.engines.kernels.cpu.library import ISAS, CpuKernels, cpu_flags, load_kernels
from tgis.errors import StartError

CPU_ISA = os.environ.get("CPU_ISA", "auto")
CACHE_DIR = str(TEST_CACHE)


def kernels_of(isa: str) -> CpuKernels:
    """Those for one instruction set, whatever CPU_ISA is; skips the test where there are none."""
    try:
        kernels = load_kernels(isa, CACHE_DIR)
    except StartError as error:
        pytest.skip(str(error))
    if kernels is None:
        assert isa == "none" or shutil.which("cc") is None, "the kernels do not compile"
        pytest.skip("CPU_ISA=none" if isa == "none" else "no C compiler")
    return kernels


def kernels_with_amx() -> CpuKernels:
    """Those for AMX, whose instructions are emulated where the CPU has none."""
    if ISAS["amx"] <= cpu_flags():
        return kernels_of("amx")
    kernels = kernels_of("avx512_bf16")
    _emulate_amx()
    return CpuKernels("amx", kernels._library)


@cache
def _emulate_amx() -> None:
    """For the rest of this process."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    source = REPOSITORY / "tests" / "support" / "amx_emulator.c"
    with tempfile.TemporaryDirectory() as directory:
        library = Path(directory, "amx_emulator.so")
        subprocess.run(["cc", "-O2", "-mfma", "-shared", "-fPIC", source, "-lm", "-o", library], check=True)
        ctypes.CDLL(str(library)).emulate_amx()


@contextmanager
def num_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def kernels_here() -> list[CpuKernels]:
    """Those for each instruction set of this CPU, the best one last."""
    return [kernels_of(isa) for isa in isa_flags() if ISAS[isa] <= cpu_flags()]


@pytest.fixture(params=[*isa_flags()])
def of_each_isa(request: pytest.FixtureRequest) -> CpuKernels:
    """Those for each instruction set; a test file gives it the name `kernels`."""
    return kernels_of(request.param)


@pytest.fixture
def of_best_isa() -> CpuKernels:
    return kernels_of("auto")


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """For the files that name it, without gradients."""
    torch.manual_seed(7)
    with torch.no_grad():
        yield
