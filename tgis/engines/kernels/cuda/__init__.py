"""Triton kernels and the use of PyTorch's variable-length attention."""

from functools import cache

import torch


@cache
def has_kernels(device: torch.device) -> bool:
    """Whether Triton serves this device."""
    return bool(device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0))


def is_fatal(error: Exception) -> bool:
    """Whether the device is out of memory or lost, which is no reason to try the same in another way."""
    is_of_capture = "captur" in str(error)  # in all messages of cudaErrorStreamCapture...
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, torch.AcceleratorError) and not is_of_capture
    )
