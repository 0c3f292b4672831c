"""Keys and values as codes of 8 bits, int8 or FP8 (E4M3), with a float32 scale behind those of each token and head.

Scales of whole blocks would make numbers depend on how a prompt was cut. Some channels of keys are far larger than
others, and the same for all tokens, so int8 divides keys by constants first, and multiplies queries by them.
"""

import torch
from torch import Tensor

from tgis.errors import StartError

CODES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}  # by value of KV_CACHE_DTYPE
SCALE_BYTES = 4
_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
_TINY = 1e-30  # as in attention_codes.h: smaller numbers are 0
_MAX_RATIO = 256.0  # of constants: a channel that is small at first may grow later


def codes_of(asked: str, device: torch.device) -> torch.dtype | None:
    """The dtype of codes that KV_CACHE_DTYPE asks for, if it does; StartError where there are no kernels for them."""
    if asked in CODES and device.type != "cpu":
        raise StartError(f"KV_CACHE_DTYPE={asked} works on CPUs only, not on {device.type}")
    return CODES.get(asked)


def is_coded(stored: Tensor) -> bool:
    """Whether keys or values are stored as codes: [..., size + SCALE_BYTES]."""
    return stored.dtype in _LARGEST


def head_size(stored: Tensor) -> int:
    """The size of the heads in a cache."""
    return int(stored.shape[-1]) - (SCALE_BYTES if is_coded(stored) else 0)


def channel_scales(key: Tensor) -> Tensor:
    """What keys are divided by, float32 [K, D], from keys [K, tokens, D] like them: powers of two, which are exact."""
    top = key.float().abs().amax(1)
    top = top.clamp(min=top.amax(-1, keepdim=True) / _MAX_RATIO)
    return torch.where(top > 0, top / torch.frexp(top).mantissa, 1.0)


def quantize(x: Tensor, codes: torch.dtype) -> Tensor:
    """Numbers [..., size] as codes [..., size + SCALE_BYTES]; those that are not finite stay visible."""
    x = x.float()
    top = x.abs().amax(-1, keepdim=True)
    scale = torch.where(top < _TINY, 0.0, top / _LARGEST[codes])
    factor = torch.where(top < _TINY, 0.0, torch.full_like(top, _LARGEST[codes]) / top)
    numbers = (x.double() * factor).round() if codes == torch.int8 else x * factor  # the former as one rounding: fma
    return torch.cat([numbers.to(codes).view(torch.uint8), scale.view(torch.uint8)], -1).view(codes)


def dequantize(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers [..., size] of codes [..., size + SCALE_BYTES]."""
    codes, scale = stored[..., :-SCALE_BYTES], stored[..., -SCALE_BYTES:]
    return (codes.float() * scale.contiguous().view(torch.float32)).to(dtype)
