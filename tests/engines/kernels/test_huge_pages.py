"""Tensors in huge pages are tensors like any other."""

from pathlib import Path

import pytest
import torch

from tgis.engines.host_memory import HugePages, empty_in_huge_pages

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def flags_at(address: int) -> set[str]:
    """Of the mapping, as /proc/PID/smaps has them."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            start, end = (int(number, 16) for number in first.split("-"))
            inside = start <= address < end
        elif inside and first == "VmFlags:":
            return set(rest)
    raise LookupError(address)


@pytest.mark.skipif(not SETTING.exists(), reason="a kernel without transparent huge pages")
def test_the_kernel_is_asked_for_huge_pages() -> None:
    x = empty_in_huge_pages((3, 1 << 20), torch.bfloat16)
    assert x.data_ptr() % (2 << 20) == 0
    assert "hg" in flags_at(x.data_ptr())
    assert "hg" in flags_at(x.data_ptr() + x.nbytes - 1)


def test_copies_lie_side_by_side() -> None:
    memory, draw = HugePages(), torch.Generator().manual_seed(0)
    shapes = [(0,), (3, 5), (1,), (1 << 25,), (1 << 12, 1 << 12), (7, 2, 3)]
    originals = [torch.randn(shape, generator=draw).to(torch.bfloat16) for shape in shapes]
    copies = [memory.copy_of(x) for x in originals]
    for x, copy in zip(originals, copies, strict=True):
        assert (copy.dtype, copy.shape, copy.is_contiguous()) == (x.dtype, x.shape, True)
        assert copy.data_ptr() % 64 == 0
        assert torch.equal(copy, x)
    small = [memory.copy_of(torch.ones(40)) for _ in range(3)]
    assert [x.data_ptr() - small[0].data_ptr() for x in small] == [0, 192, 384]
