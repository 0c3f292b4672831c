"""Keys and values as int8 codes, with a float32 scale behind those of each token and head.

Scales of blocks would make the results depend on how a prompt was cut. Some channels of keys are far larger than
others, and the same for all tokens, so keys are divided by constants first, and queries multiplied by them.
"""

import torch
from torch import Tensor

from tgis.errors import StartError

SCALE_BYTES = 4
_LARGEST = 127.0  # largest code
_TINY = 1e-30  # same value in kv_cache.c: smaller values are 0
_MAX_RATIO = 256.0  # largest ratio of constants: a channel that is small at first may grow later


def kv_dtype_of(asked: str, device: torch.device) -> torch.dtype | None:
    """int8 if KV_CACHE_DTYPE asks for it, else None; StartError on devices without kernels for int8."""
    if asked == "int8" and device.type != "cpu":
        raise StartError(f"KV_CACHE_DTYPE=int8 works on CPUs only, not on {device.type}")
    return torch.int8 if asked == "int8" else None


def is_coded(stored: Tensor) -> bool:
    """Whether keys or values are stored as codes: [..., size + SCALE_BYTES]."""
    return bool(stored.dtype == torch.int8)


def head_size(stored: Tensor) -> int:
    """The size of the heads in a cache."""
    return int(stored.shape[-1]) - (SCALE_BYTES if is_coded(stored) else 0)


def channel_scales(key: Tensor) -> Tensor:
    """What keys are divided by, float32 [K, D], from keys [K, tokens, D] like them: powers of two, which are exact."""
    top = key.float().abs().amax(1)
    top = top.clamp(min=top.amax(-1, keepdim=True) / _MAX_RATIO)
    return torch.where(top > 0, top / torch.frexp(top).mantissa, 1.0)


def quantize(x: Tensor) -> Tensor:
    """Values [..., size] as int8 codes [..., size + SCALE_BYTES]; the scale of values that are not finite is not
    finite either.
    """
    x = x.float()
    top = x.abs().amax(-1, keepdim=True)
    scale = torch.where(top < _TINY, 0.0, top / _LARGEST)
    factor = torch.where(top < _TINY, 0.0, torch.full_like(top, _LARGEST) / top)
    codes = (x.double() * factor).round().to(torch.int8)  # rounded once, as by fma
    return torch.cat([codes, scale.view(torch.int8)], -1)


def dequantize(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """The values [..., size] of codes [..., size + SCALE_BYTES]."""
    codes, scale = stored[..., :-SCALE_BYTES], stored[..., -SCALE_BYTES:]
    return (codes.float() * scale.contiguous().view(torch.float32)).to(dtype)
