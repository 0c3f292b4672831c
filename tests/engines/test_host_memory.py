"""Memory in huge pages.

That nothing waits for copies to a device and back shows on a GPU only: test_async_decode_gpu.py.
"""

from pathlib import Path

import pytest
import torch

from tgis.engines.host_memory import HugePageBuffer
from tgis.engines.memory.available import PROCESS, read_proc_bytes

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
    x = HugePageBuffer(6 << 20, 0.75).bytes
    assert x.data_ptr() % PAGE == 0.75 * PAGE
    assert "hg" in flags_at(x.data_ptr())
    assert "hg" in flags_at(x.data_ptr() + x.nbytes - 1)


def test_memory_is_real_where_it_has_been_written() -> None:
    before = read_proc_bytes(PROCESS / "status", "VmRSS")
    buffer = HugePageBuffer(256 << 20)
    buffer.bytes[: 64 << 20] = 7
    assert read_proc_bytes(PROCESS / "status", "VmRSS") - before == pytest.approx(64 << 20, rel=0.2)
    buffer.clear()
    assert read_proc_bytes(PROCESS / "status", "VmRSS") - before < 10 << 20
    assert not buffer.bytes.any()
    with pytest.raises(torch.OutOfMemoryError, match=rf"^{(1 << 60) + 1} bytes: Cannot allocate memory$"):
        HugePageBuffer((1 << 60) + 1)
