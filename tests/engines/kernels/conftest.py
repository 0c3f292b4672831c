"""Fixtures of kernel tests."""

from collections.abc import Iterator

import pytest
import torch
from cpu_kernels import kernels_of

from tgis.engines.kernels.cpu.build import isa_flags
from tgis.engines.kernels.cpu.library import CpuKernels


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    torch.manual_seed(7)
    with torch.no_grad():
        yield


@pytest.fixture(params=[*isa_flags()])
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    """Those for each instruction set."""
    return kernels_of(request.param)


@pytest.fixture
def best_kernels() -> CpuKernels:
    return kernels_of("auto")
