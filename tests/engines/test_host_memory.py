"""Copies to the device and back, and tensors in huge pages, which are like any other.

That nothing waits for copies shows on a GPU only: test_async_decode_gpu.py.
"""

import mmap
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tgis.engines.host_memory import HugePages, Mapping, download, to_device, upload
from tgis.engines.paged.attention import PagedKVCache

CPU = torch.device("cpu")
PAGE = 2 << 20
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def test_parts_are_views_of_one_copy() -> None:
    parts = [[1, 2, 3], [], [-(2**63), 2**63 - 1], range(4)]
    uploaded = upload(parts, CPU)
    assert [part.tolist() for part in uploaded] == [list(part) for part in parts]
    assert {part.dtype for part in uploaded} == {torch.int64}
    assert len({part.untyped_storage().data_ptr() for part in uploaded}) == 1
    assert {(part.data_ptr() - uploaded[0].data_ptr()) % 16 for part in uploaded} == {0}


def test_there_and_back() -> None:
    there = to_device([0.1, -0.0, float("inf")], torch.float64, CPU)
    assert download(there)() == [0.1, -0.0, float("inf")]
    assert download(torch.empty(0))() == []


def flags_at(address: int) -> set[str]:
    """The flags of the mapping, as /proc/PID/smaps has them."""
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
    x = Mapping(6 << 20, 0.75).bytes
    assert x.data_ptr() % PAGE == 0.75 * PAGE
    assert "hg" in flags_at(x.data_ptr())
    assert "hg" in flags_at(x.data_ptr() + x.nbytes - 1)


def test_layers_reach_new_pages_in_different_steps() -> None:
    """Keys and values of a layer do at once, since two threads write them."""
    cache, states = PagedKVCache(1 << 10, 16), torch.zeros(1, 3, 1, 64, dtype=torch.bfloat16)
    addresses = [[each.data_ptr() for each in cache.layer(index, states, states)] for index in range(30)]
    places = sorted(keys % PAGE for keys, values in addresses if keys % PAGE == values % PAGE)
    assert all(more - less >= PAGE / 30 / 3 for less, more in pairwise([*places, places[0] + PAGE]))
    assert len(places) == 30


def test_memory_is_real_where_it_has_been_written() -> None:
    mapping = Mapping(64 << 20)
    assert mapping.resident_bytes == 0
    mapping.bytes[:: 1 << 20][:20] = 7  # the first 20 MiB, at least a page of each
    assert 20 * mmap.PAGESIZE <= mapping.resident_bytes <= 20 << 20
    mapping.clear()
    assert mapping.resident_bytes == 0
    assert not mapping.bytes.any()
    with pytest.raises(torch.OutOfMemoryError, match="Cannot allocate"):
        Mapping(1 << 60)


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
