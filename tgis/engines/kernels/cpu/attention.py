"""Attention over the paged KV cache on CPUs: a kernel in C, for rows with one new token and for chunks alike.

Where it cannot be compiled, and for shapes and dtypes that it does not know, bodies in plain PyTorch give the same.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from tgis.engines.kernels.cpu.build import library

_LANES = 16
_UNLIMITED = 2**62
_DTYPES = {torch.float32: 0, torch.bfloat16: 1}


class _Shape(NamedTuple):
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
        *((name, ctypes.c_void_p) for name in ("q", "keys", "values", "output", "rows", "sinks")),
        *((name, ctypes.c_int64) for name in ("count", "q_token", "q_head", "window")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
        ("threads", ctypes.c_int64),
    )


@dataclass(frozen=True, slots=True)
class Kernel:
    """What is compiled for one shape. `keys` [blocks, block size, K, D] and `values` [blocks, block size, K, E] are
    contiguous and, as all states, of the dtype of that shape.
    """

    _attention: Callable[[_Work], int]
    _keep: Callable[..., None]

    def keep(self, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Write `k` [T, K, D] and `v` [T, K, E] of new tokens to their `slots` [T], of all tokens of all blocks."""
        assert k.dtype == v.dtype == keys.dtype, (k.dtype, v.dtype)
        assert keys.is_contiguous()
        assert values.is_contiguous()
        k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
        pointers = k.data_ptr(), v.data_ptr(), keys.data_ptr(), values.data_ptr(), slots.data_ptr()
        self._keep(*pointers, len(k), k.stride(0), k.stride(1), v.stride(0), v.stride(1))

    def attend(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        rows: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """The output [T, H, E] of queries [T, H, D], which are the last tokens of their rows, as `rows` has
        them; the new tokens' keys and values have been kept.
        """
        q, sinks = q if q.stride(2) == 1 else q.contiguous(), None if sinks is None else sinks.float().contiguous()
        output = q.new_empty(*q.shape[:2], values.shape[-1])
        pointers = [None if t is None else t.data_ptr() for t in (q, keys, values, output, rows, sinks)]
        numbers = len(rows), q.stride(0), q.stride(1), window or _UNLIMITED
        if self._attention(_Work(*pointers, *numbers, scale, softcap or 0.0, torch.get_num_threads())):
            raise MemoryError(f"no memory for attention of {len(q)} tokens")
        return output


def find_kernel(q: Tensor, keys: Tensor, values: Tensor) -> Kernel | None:
    """One for tensors like these, if there can be one; it is compiled now, once per shape."""
    if q.device.type != "cpu" or not q.dtype == keys.dtype == values.dtype or q.dtype not in _DTYPES:
        return None
    kv_heads, block = keys.shape[2], keys.shape[1]
    return _kernel(_Shape(_DTYPES[q.dtype], q.shape[2], values.shape[3], q.shape[1] // kv_heads, kv_heads, block))


@cache
def _kernel(shape: _Shape) -> Kernel | None:
    if shape.k_size % _LANES or shape.v_size % _LANES:
        return None
    compiled = library("attention.c", **shape._asdict())
    if compiled is None:
        return None
    attention, keep = compiled.attention, compiled.keep
    attention.argtypes, attention.restype = [ctypes.POINTER(_Work)], ctypes.c_int
    keep.argtypes, keep.restype = [ctypes.c_void_p] * 5 + [ctypes.c_int64] * 5, None
    return Kernel(attention, keep)
