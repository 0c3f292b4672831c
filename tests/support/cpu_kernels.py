"""The C kernels for tests. CPU_ISA masks instruction sets in tests as in a server: `CPU_ISA=avx2 make test`."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from repository import TEST_CACHE

from tgis.engines.kernels.cpu.library import CpuKernels, load_kernels
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
        pytest.skip("no C compiler")
    return kernels


@contextmanager
def num_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
