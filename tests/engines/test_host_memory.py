"""Memory in huge pages.

That nothing waits for copies to a device and back shows on a GPU only: test_async_decode_gpu.py.
"""

import mmap
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tgis.engines.host_memory import Mapping
from tgis.engines.paged.attention import PagedKVCache

CPU = torch.device("cpu")
PAGE = 2 << 20
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


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
