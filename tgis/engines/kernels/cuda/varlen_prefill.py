"""Prefill attention on CUDA: PyTorch's variable-length attention, one call for the prefill chunks of a step.

In torch 2.11 to 2.13 this is FlashAttention 2: float16 and bfloat16, head sizes up to 256 in steps of 8, keys as wide
as values, any number of query heads per KV head (newer releases want to be told). Queries are the last tokens of their
sequence, so a chunk sees its context. A window counts the tokens beside the query's own. There is no softcap and no
sink, and nothing for CPUs. Its paged mode wants blocks of a multiple of 256 tokens: ours are gathered instead.
"""

from dataclasses import dataclass
from inspect import signature
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from tgis.engines.host_memory import to_device
from tgis.engines.kernels.attention_inputs import AttentionParams, PrefillChunk

MAX_GATHERED_TOKENS = 1 << 16  # keys and values copied per call, unless a single sequence has more
_GQA = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}  # torch 2.11 does not need it


@dataclass(frozen=True, slots=True)
class VarlenBatch:
    """Consecutive prefill chunks of a flat batch that are computed by one call."""

    tokens: slice  # rows of the flat batch
    cu_seqlens: Tensor  # int32 [2, chunks + 1]: cumulative query lengths and sequence lengths, from 0
    max_seqlens: tuple[int, int]  # the largest of each
    context_slots: Tensor | None  # int64 [keys]: slots of the KV cache; None: no chunk has context


def is_supported(q: Tensor, key_cache: Tensor, value_cache: Tensor, params: AttentionParams) -> bool:
    """Whether `varlen_prefill` can compute this, on a device of compute capability 8.0 or newer."""
    return (
        q.dtype in (torch.float16, torch.bfloat16)
        and q.dtype == key_cache.dtype == value_cache.dtype
        and q.shape[-1] == value_cache.shape[-1] <= 256
        and q.shape[-1] % 8 == 0
        and params.softcap is None
        and params.sinks is None
        and params.bias is None
    )


def make_varlen_batches(chunks: list[PrefillChunk], block_size: int) -> list[VarlenBatch]:
    """Consecutive chunks in as few calls as the memory for gathered keys and values allows."""
    has_context = any(chunk.num_computed_tokens for chunk in chunks)
    batches = []
    for group in _groups(chunks) if has_context else [chunks]:
        queries, keys = [chunk.num_tokens for chunk in group], [chunk.seq_len for chunk in group]
        lengths = [[0, *accumulate(queries)], [0, *accumulate(keys)]]
        cu_seqlens = to_device(lengths, torch.int32, group[0].block_table.device)
        slots = _context_slots(group, block_size) if has_context else None
        tokens = slice(group[0].tokens.start, group[-1].tokens.stop)
        batches.append(VarlenBatch(tokens, cu_seqlens, (max(queries), max(keys)), slots))
    return batches


def varlen_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_cache: tuple[Tensor, Tensor],
    batches: list[VarlenBatch],
    params: AttentionParams,
) -> list[Tensor]:
    """The outputs [tokens, H, D] of each batch, for flat queries [T, H, D] and new keys and values [T, K, D]. The
    caches of the layer, [blocks, block size, K, D], already hold the new ones.
    """
    window_size = (-1 if params.window is None else params.window - 1, 0 if params.causal else -1)
    outputs = []
    for batch in batches:
        keys, values = k[batch.tokens], v[batch.tokens]
        if batch.context_slots is not None:
            keys, values = (states.flatten(0, 1).index_select(0, batch.context_slots) for states in kv_cache)
        lengths = *batch.cu_seqlens, *batch.max_seqlens
        arguments = {"scale": params.scale, "window_size": window_size, **_GQA}
        outputs.append(varlen_attn(q[batch.tokens], keys, values, *lengths, **arguments))
    return outputs


def _groups(chunks: list[PrefillChunk]) -> list[list[PrefillChunk]]:
    """Consecutive chunks of at most MAX_GATHERED_TOKENS of context together, or one that alone has more."""
    groups: list[list[PrefillChunk]] = [[]]
    total = 0
    for chunk in chunks:
        if total and total + chunk.seq_len > MAX_GATHERED_TOKENS:
            groups.append([])
            total = 0
        groups[-1].append(chunk)
        total += chunk.seq_len
    return groups


def _context_slots(chunks: list[PrefillChunk], block_size: int) -> Tensor:
    """The cache slots of all tokens of the sequences, end to end: int64, block * size + offset."""
    blocks = torch.cat([chunk.block_table for chunk in chunks])
    slots = (blocks[:, None] * block_size + torch.arange(block_size, device=blocks.device)).flatten()
    by_seq = slots.split([len(chunk.block_table) * block_size for chunk in chunks])
    return torch.cat([states[: chunk.seq_len] for states, chunk in zip(by_seq, chunks, strict=True)])
