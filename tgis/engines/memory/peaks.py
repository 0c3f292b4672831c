"""How much memory was taken at the worst moment, in bytes: what torch counts on a CUDA device, what the kernel counts
of this process on the CPU.
"""

import ctypes
import gc
from typing import Protocol

import torch

from tgis.engines.memory.available import PROCESS, read_proc_bytes

_RESET_PEAK = "5"  # what proc(5) says to write to clear_refs


class PeakMeter(Protocol):
    """Tells how much memory was taken at the worst moment."""

    def reset(self) -> int:
        """Give back what is unused, and forget the worst moment so far; what is in use."""

    def peak(self) -> int:
        """Most that was in use at any moment since `rest`."""


def peak_meter(device: torch.device) -> PeakMeter:
    """The meter of the device; OSError where the system tells nothing."""
    return DeviceMeter(device) if device.type == "cuda" else ResidentMeter()


class DeviceMeter:
    """Counts what torch has allocated on a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def reset(self) -> int:
        """Empty the allocator's cache and reset torch's statistics."""
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        return int(torch.cuda.memory_allocated(self._device))

    def peak(self) -> int:
        """Read torch's statistics."""
        return int(torch.cuda.max_memory_allocated(self._device))


class ResidentMeter:
    """Counts this process's resident memory; the kernel keeps its peak, to the page."""

    def __init__(self) -> None:
        self._trim = ctypes.CDLL("libc.so.6").malloc_trim
        self.reset()

    def reset(self) -> int:
        """Let the C library return what it keeps for later, and the kernel begin again."""
        gc.collect()
        self._trim(0)
        (PROCESS / "clear_refs").write_text(_RESET_PEAK)
        return read_proc_bytes(PROCESS / "status", "VmRSS")

    def peak(self) -> int:
        """Ask the kernel."""
        return read_proc_bytes(PROCESS / "status", "VmHWM")
