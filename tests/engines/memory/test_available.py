"""Available and used memory, by fake and real files of the kernel."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from batches import engine_options

from tgis.engines.memory import available
from tgis.engines.memory.available import PeakMeter, available_memory, read_proc_bytes, total_memory, used_memory
from tgis.engines.memory.capacity import KVBudget
from tgis.errors import StartError
from tgis.ipc.lookups import AdapterStoreOptions

CPU = torch.device("cpu")
STAT = "anon 100\nfile 900\n{0}active_file 300\n{0}inactive_file 500\n{1} 50\n"

System = Callable[..., None]


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> System:
    """A machine with 10,000 KiB, of which 8,000 are available, and cgroups."""
    monkeypatch.setattr(available, "_ROOT", tmp_path)
    monkeypatch.setattr(available, "_MEMINFO", tmp_path / "meminfo")
    (tmp_path / "meminfo").write_text("MemTotal:  10000 kB\nMemFree: 1 kB\nMemAvailable:    8000 kB\n")

    def build(membership: str, **groups: dict[str, str]) -> None:
        (tmp_path / "proc" / "self").mkdir(parents=True)
        (tmp_path / "proc" / "self" / "cgroup").write_text(membership)
        for name, files in groups.items():
            directory = tmp_path / "sys" / "fs" / "cgroup" / name.replace("__", "/").strip("_")
            directory.mkdir(parents=True, exist_ok=True)
            for file, text in files.items():
                (directory / file).write_text(text)

    return build


def version_2(limit: str, used: int) -> dict[str, str]:
    stat = STAT.format("", "file_mapped")
    return {"memory.max": f"{limit}\n", "memory.current": f"{used}\n", "memory.stat": stat}


def version_1(limit: int, used: int) -> dict[str, str]:
    stat = "active_file 1\ninactive_file 2\n" + STAT.format("total_", "total_mapped_file")
    return {"memory.limit_in_bytes": str(limit), "memory.usage_in_bytes": str(used), "memory.stat": stat}


MACHINE = 8000 << 10, 10000 << 10
CACHED = 750  # bytes of files that nobody maps
MAPPED = version_2("700000", 100_000) | {"memory.stat": STAT.replace("} 50", "} 900").format("", "file_mapped")}
CGROUPS: dict[str, tuple[str, dict[str, dict[str, str]], tuple[int, int]]] = {
    "no limit": ("0::/\n", {"_": {}}, MACHINE),
    "a container": ("0::/\n", {"_": version_2("1000000", 400_000)}, (600_000 + CACHED, 1_000_000)),
    "a limit beyond the machine": ("0::/\n", {"_": version_2("99000000", 0)}, MACHINE),
    "the tightest on the way up": (
        "0::/slice/unit\n",
        {"_": version_2("max", 0), "slice": version_2("500000", 100_000), "slice__unit": version_2("max", 9)},
        (400_000 + CACHED, 500_000),
    ),
    "version 1": (
        "9:cpu,cpuacct:/pod\n4:memory:/pod\n0::/\n",
        {"memory": version_1(2**63 - 4096, 7), "memory__pod": version_1(600_000, 200_000)},
        (400_000 + CACHED, 600_000),
    ),
    "mapped shared memory": ("0::/\n", {"_": MAPPED}, (600_000, 700_000)),
    "a path of the host": ("0::/kubepods/pod1/abc\n", {"_": version_2("700000", 100_750)}, (600_000, 700_000)),
}


@pytest.mark.parametrize("name", CGROUPS)
def test_memory_within_the_limits_of_control_groups(system: System, name: str) -> None:
    """Cached files do not count as used; inside a container its group is the root."""
    membership, groups, expected = CGROUPS[name]
    system(membership, **groups)
    assert (available_memory(CPU), total_memory(CPU)) == expected


def test_memory_of_gpus_that_is_reserved_and_unused_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be in pieces that nothing fits in."""
    stats = {"mem_get_info": (500, 1000), "memory_reserved": 440, "max_memory_reserved": 460, "empty_cache": None}
    stats |= {"get_per_process_memory_fraction": 0.9, "reset_peak_memory_stats": None, "memory_allocated": 1}
    calls, cuda = mock.Mock(**{f"{name}.return_value": value for name, value in stats.items()}), torch.device("cuda")
    for name in stats:
        monkeypatch.setattr(torch.cuda, name, getattr(calls, name))
    assert available_memory(cuda) == 900 - 440
    calls.mem_get_info.return_value = 300, 1000
    assert (available_memory(cuda), calls.empty_cache.call_count) == (300, 2)
    calls.reset_mock()
    meter = PeakMeter(cuda)
    freed = [mock.call.empty_cache(), mock.call.reset_peak_memory_stats(cuda)]
    assert [calls.mock_calls[:2], meter.reset(), meter.peak()] == [freed, 440, 460]
    monkeypatch.setattr(available, "read_proc_bytes", lambda _, name: 7 if name == "VmRSS" else 0)
    assert (used_memory(cuda), used_memory(CPU)) == (7 + 1, 7)


def test_where_peaks_are_counted_exactly_the_margin_is_smaller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    defaults: dict[str, Any] = {"estimate_memory": "auto", "batch_safety_margin": None}
    monkeypatch.setattr(available, "available_memory", lambda _: 1000)

    def found(device: str, to_load: int = 0, extra: int = 0, **changes: Any) -> int:
        options = engine_options(tmp_path, **defaults | changes)
        return KVBudget(options, torch.device(device), 100, 16, to_load, extra).num_blocks(1, lambda: 100)

    assert found("cuda") == 920 - 100
    assert (found("cuda", batch_safety_margin=5), found("cuda", batch_safety_margin=0)) == (950 - 100, 1000 - 100)
    assert found("cuda", adapter_store=AdapterStoreOptions(None, 50, 0)) == 950 * 8 // 10 - 100
    assert found("cuda", estimate_memory="off") == 800
    assert found("cuda", estimate_memory="manual", batch_safety_margin=99) == 16  # one request of 256 tokens
    options = engine_options(tmp_path, max_sequence_length=250)
    assert KVBudget(options, CPU, 100, 16, 0, 3).num_blocks(0, lambda: 1 << 40) == (16 + 3) * 100  # no attention
    assert found("cuda", extra=3) == 800 - 100
    assert found("cpu") == 800 * 4 // 10
    assert found("cpu", to_load=500) == 400 * 4 // 10
    assert found("cpu", num_shards=4, nnodes=2) == 400 * 4 // 10
    assert found("cpu", to_load=500, kv_cache_bytes=500) == 500
    assert found("cpu", num_shards=2, nnodes=2, kv_cache_bytes=500) == 250
    with pytest.raises(StartError, match=r"^no memory is left for a KV cache of 500 bytes, 499 bytes are free: lower"):
        found("cpu", to_load=501, kv_cache_bytes=500)
    with pytest.raises(StartError, match="a KV cache of 1 bytes, 120 bytes are free"):
        found("cpu", to_load=880)
    sizes = {(10, 4, 0): (7, 4), (10, 4, 1): (11, 4), (10, 99, 1): (16, 16)}
    for (size, rows, cache), expected in sizes.items():
        options = engine_options(tmp_path, **defaults, prefix_cache=bool(cache))
        slots, rest = KVBudget(options, CPU, rows, 16).with_states(size, 3, lambda: 100)
        assert ((slots, rest.max_batch_size), rest.to_load) == (expected, slots * size)
    assert KVBudget(options, CPU, 9, 16).with_states(160, 3, lambda: 100)[0] == 1
    with pytest.raises(StartError, match=r"^no memory is left for states of 161 bytes: grant more memory$"):
        KVBudget(options, CPU, 9, 16).with_states(161, 3, lambda: 100)
    monkeypatch.setattr(available, "available_memory", lambda _: 3500)
    assert (found("cuda", kv_cache_bytes=1100), found("cpu")) == (1100, 1120)
    monkeypatch.setattr(available, "available_memory", lambda _: 1300)
    assert found("cuda") == 1088  # not 1096: a multiple of 64


def test_a_system_without_an_entry_is_told() -> None:
    with pytest.raises(OSError, match=r"^/proc/self/status has no entry VmAnything$"):
        read_proc_bytes(available.PROCESS / "status", "VmAnything")


def test_the_meter_sees_freed_memory_in_the_peak() -> None:
    meter = PeakMeter(CPU)
    rest = meter.reset()
    torch.ones(64 << 20, dtype=torch.uint8)
    assert 63 << 20 < meter.peak() - rest < 80 << 20
    assert abs(meter.reset() - rest) < 16 << 20
    assert meter.peak() - rest < 16 << 20
