"""Attention over the paged KV cache on CPUs, by attention.c: decodes and prompt chunks in one call."""

import ctypes

import torch
from torch import Tensor

from tgis.engines.kernels.attention_inputs import AttentionParams
from tgis.engines.kernels.cpu.library import DTYPES, FLOAT, INTEGER, POINTER, CpuKernels, structure
from tgis.engines.kernels.kv_codes import head_size, is_coded

HEAD_MULTIPLE = 16  # head sizes are multiples of the lanes of the widest vectors
_MAX_SIZE, _MAX_CODED_SIZE = 512, 256  # largest head sizes, plain and coded
_MAX_GROUP = 256  # most query heads of a KV head: scratch memory must fit on the stack of a thread
_PANEL = 16  # tokens: as in attention_tile.h; blocks are made of whole ones
_NO_WINDOW = 2**62


# `attention_args` and `write_args` of attention.c.
_AttentionArgs = structure(
    ("q k_cache v_cache output sequences sinks bias key_scales", POINTER),
    ("num_seqs q_token_stride q_head_stride k_size v_size", INTEGER),
    ("kv_heads group block_size window bias_row bias_origin", INTEGER),
    ("scale softcap", FLOAT),
    ("is_coded causal threads", INTEGER),
)
_WriteArgs = structure(
    ("k v k_cache v_cache slot_mapping key_scales", POINTER),
    ("tokens kv_heads block_size k_size v_size", INTEGER),
    ("k_token_stride k_head_stride v_token_stride v_head_stride is_coded threads", INTEGER),
)


class CpuAttention:
    """The kernels for caches `k_cache` [blocks, block size, K, D] and `v_cache` [blocks, block size, K, E], which are
    contiguous and have the dtype of the queries, keys and values, or are int8 codes with their scales behind them. The
    order of the values within a block is that of attention_tile.h.
    """

    def __init__(self, kernels: CpuKernels) -> None:
        self._attend = kernels.functions("paged_attention", [ctypes.POINTER(_AttentionArgs)], ctypes.c_int)
        self._write = kernels.functions("write_kv_cache", [ctypes.POINTER(_WriteArgs)])

    @staticmethod
    def supports(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> bool:
        sizes, group = map(head_size, (k_cache, v_cache)), q.shape[1] // k_cache.shape[2]
        largest = _MAX_CODED_SIZE if is_coded(k_cache) else _MAX_SIZE
        fits = group <= _MAX_GROUP and all(size <= largest and size % HEAD_MULTIPLE == 0 for size in sizes)
        same_dtype = k_cache.dtype == v_cache.dtype and (is_coded(k_cache) or q.dtype == k_cache.dtype)
        return fits and same_dtype and q.dtype in DTYPES and k_cache.shape[1] % _PANEL == 0

    def write_kv_cache(
        self,
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        key_scales: Tensor | None = None,
    ) -> None:
        """Store `k` [T, K, D] and `v` [T, K, E] of new tokens in their slots [T], counted in tokens."""
        assert k.dtype == v.dtype, (k.dtype, v.dtype)
        assert k.dtype == k_cache.dtype or is_coded(k_cache), (k.dtype, k_cache.dtype)
        assert k_cache.is_contiguous()
        assert v_cache.is_contiguous()
        k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
        args = _WriteArgs(
            *(tensor.data_ptr() for tensor in (k, v, k_cache, v_cache, slot_mapping)),
            None if key_scales is None else key_scales.data_ptr(),
            *(len(k), k.shape[1], k_cache.shape[1], k.shape[2], v.shape[2]),
            *(k.stride(0), k.stride(1), v.stride(0), v.stride(1)),
            *(is_coded(k_cache), torch.get_num_threads()),
        )
        self._write[k.dtype](args)

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, sequences: Tensor, params: AttentionParams) -> Tensor:
        """The output [T, H, E] of queries [T, H, D], whose keys and values are in the cache.

        `sequences` is int64 [sequences, 4]: the first query, the number of queries, which are the last tokens of the
        sequence, its length, and the address of its block table, int64.
        """
        q = q if q.stride(2) == 1 else q.contiguous()
        sinks = None if params.sinks is None else params.sinks.float().contiguous()
        bias = params.bias
        v_size = head_size(v_cache)
        output = q.new_empty(*q.shape[:2], v_size)
        pointers = (x.data_ptr() for x in (q, k_cache, v_cache, output, sequences))
        optional = (None if x is None else x.data_ptr() for x in (sinks, bias, params.key_scales))
        _, block_size, kv_heads, _ = k_cache.shape
        args = _AttentionArgs(
            *(*pointers, *optional),
            *(len(sequences), q.stride(0), q.stride(1), q.shape[2], v_size),
            *(kv_heads, q.shape[1] // kv_heads, block_size, params.window or _NO_WINDOW),
            *(0 if bias is None else bias.stride(0), -1 if params.bias_origin is None else params.bias_origin),
            *(params.scale, params.softcap or 0.0),
            *(is_coded(k_cache), params.causal, torch.get_num_threads()),
        )
        if self._attend[q.dtype](args):
            raise MemoryError(f"no memory for attention of {len(q)} tokens")
        return output
