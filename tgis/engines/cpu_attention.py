"""Decode attention over the paged KV cache on CPUs: a kernel in C.

Where it cannot be compiled, and for shapes and dtypes that it does not know, bodies in plain PyTorch give the same.
"""

import ctypes
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache

import torch
from torch import Tensor

from tgis.engines.c_kernels import library

_LANES = 16
_UNLIMITED = 2**62
_DTYPES = {torch.float32: 0, torch.bfloat16: 1}


@dataclass(frozen=True, slots=True)
class _Shape:
    """What the kernel is compiled for; the names are those of its macros."""

    half: int
    k_size: int
    v_size: int
    group: int
    kv_heads: int
    block: int


class _Work(ctypes.Structure):
    """The kernel's argument."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "keys", "values", "output", "tables", "lengths", "sinks")),
        *((name, ctypes.c_int64) for name in ("rows", "width", "window")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
        ("threads", ctypes.c_int64),
    )


def has_kernel(q: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether `decode_attention` can do this; what it takes to compile the kernel is taken here, once per shape."""
    fits = q.device.type == "cpu" and q.dtype == keys.dtype == values.dtype and q.dtype in _DTYPES
    return fits and _kernel(_shape(q, keys, values)) is not None


def decode_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """The output [B, H, E] of queries [B, H, D], each of which is the last of its row's `lengths` [B] tokens.

    `keys` [blocks, block size, K, D] and `values` [blocks, block size, K, E] are contiguous and of q's dtype; `tables`
    [B, most blocks] and `lengths` are contiguous int64. There must be a kernel for it.
    """
    kernel = _kernel(_shape(q, keys, values))
    assert kernel is not None
    assert all(t.is_contiguous() for t in (keys, values, tables, lengths))
    assert tables.dtype == lengths.dtype == torch.int64
    q, sinks = q.contiguous(), None if sinks is None else sinks.float().contiguous()
    output = q.new_empty(*q.shape[:2], values.shape[-1])
    pointers = [None if t is None else t.data_ptr() for t in (q, keys, values, output, tables, lengths, sinks)]
    threads = torch.get_num_threads()
    failed = kernel(_Work(*pointers, *tables.shape, window or _UNLIMITED, scale, softcap or 0.0, threads))
    if failed:
        raise MemoryError(f"no memory for the scores of {tables.shape[1] * keys.shape[1]} tokens")
    return output


def _shape(q: Tensor, keys: Tensor, values: Tensor) -> _Shape:
    kv_heads, block = keys.shape[2], keys.shape[1]
    return _Shape(_DTYPES[q.dtype], q.shape[2], values.shape[3], q.shape[1] // kv_heads, kv_heads, block)


@cache
def _kernel(shape: _Shape) -> Callable[[_Work], int] | None:
    if shape.k_size % _LANES or shape.v_size % _LANES:
        return None
    compiled = library("decode_attention.c", **asdict(shape))
    if compiled is None:
        return None
    kernel = compiled.decode_attention
    kernel.argtypes, kernel.restype = [ctypes.POINTER(_Work)], ctypes.c_int
    return kernel
