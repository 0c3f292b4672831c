"""How much memory this process may still take, of a CUDA device or of the machine and its container; and what it
is called when a step finds too little.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from tgis.errors import OutOfMemory, StartError
from tgis.ipc.messages import EngineOptions

_CGROUPS = Path("/sys/fs/cgroup")
PROCESS = Path("/proc/self")
_MEMINFO = Path("/proc/meminfo")
_UNITS = ("bytes", "KiB", "MiB", "GiB")


def memory_for_batches(options: EngineOptions, device: torch.device) -> int:
    """Bytes for what rows need, now that the model is loaded: a margin, soft prompts and adapters are held back."""
    prompts = options.adapter_store.cache_bytes if options.adapter_store else 0
    return max(available_memory(device) - prompts, 0) * (100 - options.batch_safety_margin) // 100


def available_memory(device: torch.device) -> int:
    """Bytes that can be allocated now."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        allocated = torch.cuda.memory_allocated(device)
        reusable = torch.cuda.memory_reserved(device) - allocated
        return int(min(free + reusable, total_memory(device) - allocated))
    return min([read_proc_bytes(_MEMINFO, "MemAvailable"), *(limit - used for limit, used in _cgroup_usage())])


def total_memory(device: torch.device) -> int:
    """Bytes that could be allocated if none were."""
    if device.type == "cuda":
        _, total = torch.cuda.mem_get_info(device)
        return int(total * torch.cuda.get_per_process_memory_fraction(device))
    return min([read_proc_bytes(_MEMINFO, "MemTotal"), *(limit for limit, _ in _cgroup_usage())])


def used_memory(device: torch.device) -> int:
    """Bytes that this process has taken, of the device and of the machine."""
    resident = read_proc_bytes(PROCESS / "status", "VmRSS")
    return resident + int(torch.cuda.memory_allocated(device)) if device.type == "cuda" else resident


def format_bytes(size: float) -> str:
    """Bytes as people and the limits of containers count them."""
    power = 0
    while size >= 1000 and power < len(_UNITS) - 1:
        size, power = size / 1024, power + 1
    return f"{size:.3g} {_UNITS[power]}"


def read_proc_bytes(file: Path, name: str) -> int:
    """The bytes of an entry of a file of /proc that tells them in kB."""
    for line in file.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{file} does not tell {name}")


def _cgroup_usage() -> Iterator[tuple[int, int]]:
    """Limit and use of every control group that this process is in and that has a limit.

    Seen from within a container its group is the root, so the path that the kernel tells may not exist.
    """
    for line in (PROCESS / "cgroup").read_text().splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers == "":  # version 2
            root, files = _CGROUPS, ("memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            root, files = _CGROUPS / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
        else:
            continue
        group = root / name.lstrip("/")
        for directory in [group, *group.parents]:
            if directory.is_relative_to(root) and (directory / files[0]).is_file():
                yield from _limit_and_usage(directory, *files)


def _limit_and_usage(directory: Path, most: str, used: str, prefix: str) -> Iterator[tuple[int, int]]:
    limit = (directory / most).read_text().strip()
    if limit != "max":
        lines = (directory / "memory.stat").read_text().splitlines()
        facts = {name.removeprefix(prefix): int(value) for name, value in (line.split() for line in lines)}
        mapped = facts.get("file_mapped", facts.get("mapped_file", 0))
        cached = facts["active_file"] + facts["inactive_file"] - mapped  # what the kernel gives up when asked
        yield int(limit), int((directory / used).read_text()) - max(0, cached)


@contextmanager
def device_errors(what: str) -> Iterator[None]:
    """Raise OutOfMemory where the device has too little for it, and StartError where the device is lost."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator: can't allocate memory" in str(error):
            raise OutOfMemory(f"the device is out of memory in {what}") from error
        if isinstance(error, torch.AcceleratorError):
            raise StartError(f"the device is lost: {error}") from error
        raise
