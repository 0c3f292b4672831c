"""Triton kernels and the use of PyTorch's variable-length attention."""

from functools import cache

import torch


@cache
def has_kernels(device: torch.device) -> bool:
    """Whether Triton serves this device."""
    return bool(device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0))
