"""The memory that is available to this process, of a CUDA device or of the machine and its container, its peak, and the
errors of steps that run out of it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from tgis.errors import OutOfMemory, StartError
from tgis.ipc.messages import EngineOptions
from tgis.utils.cpus import control_groups
from tgis.utils.memory import trim_heap

_ROOT = Path("/")
_CGROUP_FILES = (  # limit, usage, and the prefix of statistics that include groups below: versions 2 and 1
    ("memory.max", "memory.current", ""),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)
PROCESS = Path("/proc/self")
_MEMINFO = Path("/proc/meminfo")
_RESET_PEAK = "5"  # see clear_refs in proc(5)
DEFAULT_MARGIN = 20  # percent, as in TGIS


def memory_for_batches(
    options: EngineOptions, device: torch.device, default_margin: int = DEFAULT_MARGIN, to_load: int = 0
) -> int:
    """Bytes of a rank for the KV cache and for steps once the model is loaded, of which `to_load` bytes are not yet,
    less a margin and the cache of adapters.
    """
    prompts = options.adapter_store.cache_bytes if options.adapter_store else 0
    left = max(rank_memory(options, device) - to_load - prompts, 0)
    return left * (100 - safety_margin(options, default_margin)) // 100


def rank_memory(options: EngineOptions, device: torch.device) -> int:
    """Bytes that a rank can allocate now: its share of the machine's, while each has a GPU of its own."""
    return available_memory(device) // (options.ranks_per_node if device.type == "cpu" else 1)


def safety_margin(options: EngineOptions, default: int = DEFAULT_MARGIN) -> int:
    """Percent of memory to keep free."""
    return default if options.batch_safety_margin is None else options.batch_safety_margin


def available_memory(device: torch.device) -> int:
    """Bytes that can be allocated now."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what stays reserved and unused is in pieces
        free, _ = torch.cuda.mem_get_info(device)
        return int(min(free, total_memory(device) - torch.cuda.memory_reserved(device)))
    return min([read_proc_bytes(_MEMINFO, "MemAvailable"), *(limit - used for limit, used in _cgroup_usage())])


def total_memory(device: torch.device) -> int:
    """Bytes that could be allocated by a process that has allocated nothing."""
    if device.type == "cuda":
        _, total = torch.cuda.mem_get_info(device)
        return int(total * torch.cuda.get_per_process_memory_fraction(device))
    return min([read_proc_bytes(_MEMINFO, "MemTotal"), *(limit for limit, _ in _cgroup_usage())])


def used_memory(device: torch.device) -> int:
    """Bytes that this process uses on the device and on the machine."""
    resident = read_proc_bytes(PROCESS / "status", "VmRSS")
    return resident + int(torch.cuda.memory_allocated(device)) if device.type == "cuda" else resident


class PeakMeter:
    """Peak memory of this process: the memory that torch reserved on a CUDA device, unused pieces included, or the
    resident memory on a CPU.
    """

    def __init__(self, device: torch.device) -> None:
        """OSError where the system does not report it."""
        self._device = device
        self.reset()

    def reset(self) -> int:
        """Return unused memory to the system and forget the peak; bytes in use."""
        trim_heap()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._device)
            return int(torch.cuda.memory_reserved(self._device))
        (PROCESS / "clear_refs").write_text(_RESET_PEAK)
        return read_proc_bytes(PROCESS / "status", "VmRSS")

    def peak(self) -> int:
        """Most bytes in use at any moment since `reset`."""
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_reserved(self._device))
        return read_proc_bytes(PROCESS / "status", "VmHWM")


def read_proc_bytes(file: Path, name: str) -> int:
    """An entry of a /proc file that is in kB, as bytes."""
    for line in file.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{file} has no entry {name}")


def _cgroup_usage() -> Iterator[tuple[int, int]]:
    """Limit and usage of every control group of this process that has a limit."""
    for group in control_groups("memory", _ROOT):
        for files in _CGROUP_FILES:
            if (group / files[0]).is_file():
                yield from _limit_and_usage(group, *files)


def _limit_and_usage(directory: Path, limit_file: str, usage_file: str, prefix: str) -> Iterator[tuple[int, int]]:
    limit = (directory / limit_file).read_text().strip()
    if limit != "max":
        lines = (directory / "memory.stat").read_text().splitlines()
        stat = {name.removeprefix(prefix): int(value) for name, value in (line.split() for line in lines)}
        mapped = stat.get("file_mapped", stat.get("mapped_file", 0))
        cached = stat["active_file"] + stat["inactive_file"] - mapped  # reclaimable
        yield int(limit), int((directory / usage_file).read_text()) - max(0, cached)


@contextmanager
def device_errors(what: str) -> Iterator[None]:
    """Turn torch's errors into OutOfMemory, and into StartError where the device is lost."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        no_memory = isinstance(error, (MemoryError, torch.OutOfMemoryError))
        if no_memory or "DefaultCPUAllocator: can't allocate memory" in str(error):
            raise OutOfMemory(f"the device is out of memory in {what}") from error
        if isinstance(error, torch.AcceleratorError):
            raise StartError(f"the device is lost: {error}") from error
        raise


@contextmanager
def warm_up_errors() -> Iterator[None]:
    """Turn errors of the warm-up into StartError; a larger margin may prevent them."""
    try:
        with device_errors("the warm-up"):
            yield
    except OutOfMemory as error:
        raise StartError(f"{error}: raise BATCH_SAFETY_MARGIN, or lower MAX_BATCH_SIZE or KV_CACHE_SIZE_MB") from error
