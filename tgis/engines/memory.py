"""How much memory this process may still take, of a CUDA device or of the machine and its container; and what it
is called when a step finds too little.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from tgis.errors import OutOfMemory, StartError
from tgis.messages import EngineOptions

_CGROUP = Path("/sys/fs/cgroup")


def memory_for_rows(options: EngineOptions, device: torch.device) -> int:
    """Bytes for what rows need, now that the model is loaded: a margin, soft prompts and adapters are held back."""
    prompts = options.prompts.cache_bytes if options.prompts else 0
    return max(_granted(device) - prompts, 0) * (100 - options.batch_safety_margin) // 100


def _granted(device: torch.device) -> int:
    """Bytes that can be allocated now."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        reusable = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        fraction = torch.cuda.get_per_process_memory_fraction(device)
        share: int = min(free + reusable, int(total * fraction) - torch.cuda.memory_allocated(device))
        return share
    return min(_machine_available(), _container_available())


def _machine_available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("every Linux since 3.14 says MemAvailable")


def _container_available() -> int:
    """What the container's limit leaves (cgroup v2); a machine without one grants everything."""
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
    except FileNotFoundError:
        return 1 << 62
    return 1 << 62 if limit == "max" else int(limit) - used


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
