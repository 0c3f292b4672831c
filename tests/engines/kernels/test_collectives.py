"""Sums and concatenations over ranks, which are threads here."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cpu_kernels import kernels_of
from torch import Tensor

from tgis.engines.kernels.cpu.build import isa_flags
from tgis.engines.kernels.cpu.collectives import CpuCollectives, shared_bytes

SIZES = [1, 17, 576, 40_003, (1 << 20) // 2 + 5]  # the last is more than a round moves of bfloat16


class Ranks:
    """Ranks of one group, which are called at a time."""

    def __init__(self, isa: str, count: int) -> None:
        self.fd = os.memfd_create("ranks")
        os.ftruncate(self.fd, shared_bytes(count))
        self._ends = [CpuCollectives(kernels_of(isa), self.fd, rank, count) for rank in range(count)]
        self._pool = ThreadPoolExecutor(count)

    def each(self, call: Callable[[CpuCollectives, Tensor], Tensor], inputs: list[Tensor]) -> list[Tensor]:
        return list(self._pool.map(call, self._ends, inputs))


@pytest.fixture(params=list(isa_flags()))
def three_ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    ranks = Ranks(request.param, 3)
    yield ranks
    os.close(ranks.fd)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_added_in_the_order_of_the_ranks(three_ranks: Ranks, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for size in SIZES:
        inputs = [torch.randn(size, generator=generator).to(dtype) for _ in range(3)]
        expected = ((inputs[0].float() + inputs[1].float()) + inputs[2].float()).to(dtype)
        for found in three_ranks.each(CpuCollectives.all_reduce, [x.clone() for x in inputs]):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 5), (3, 1 << 18), (2, 3, 64)])
def test_rows_are_gathered(three_ranks: Ranks, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=generator).to(dtype) for _ in range(3)]
    for found in three_ranks.each(CpuCollectives.all_gather, inputs):
        assert torch.equal(found, torch.cat(inputs, -1))


def test_ranks_that_are_called_late_or_soon_again_miss_nothing(three_ranks: Ranks) -> None:
    """A thousand rounds without anything between them, in ranks that run at different speeds."""

    def sums(end: CpuCollectives, x: Tensor) -> Tensor:
        found = []
        for number in range(1000):
            if x.item() == number % 3:
                sum(range(500))
            found.append(end.all_reduce(x * 1000 + number).item())
        return torch.tensor(found)

    for found in three_ranks.each(sums, [torch.tensor([float(rank)]) for rank in range(3)]):
        assert torch.equal(found, torch.tensor([3000.0 + 3 * number for number in range(1000)]))
