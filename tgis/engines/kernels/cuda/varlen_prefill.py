"""Attention of chunks of prompts on CUDA: PyTorch's variable-length attention, one call for the chunks of a step.

What it is (torch 2.11 to 2.13, FlashAttention 2): it takes float16 and bfloat16, heads of up to 256 in steps of 8, keys
as wide as values, and any number of query heads to a KV head (newer releases want to be told). Queries are the last
tokens of their row, so a chunk sees what came before it. A window counts the tokens beside the query's own. There is
no soft cap and no sink, and nothing for CPUs. Pages must be multiples of 256 tokens: ours are gathered instead.
"""

from functools import cache
from inspect import signature
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from tgis.engines.kernels.transfers import to_device
from tgis.engines.paged.batch import PrefillChunk, VarlenBatch

MAX_GATHERED_TOKENS = 1 << 16  # tokens of context copied at a time, if one row alone has not more


def is_supported(q: Tensor, keys: Tensor, values: Tensor, softcap: float | None, sinks: Tensor | None) -> bool:
    """Whether `prefill_attention` can do this, on a device of compute capability 8.0 or newer."""
    return (
        q.dtype in (torch.float16, torch.bfloat16)
        and q.dtype == keys.dtype == values.dtype
        and q.shape[-1] == values.shape[-1] <= 256
        and q.shape[-1] % 8 == 0
        and softcap is None
        and sinks is None
    )


def make_varlen_batches(chunks: list[PrefillChunk], block_size: int) -> list[VarlenBatch]:
    """The chunks in as few calls as the memory for copies allows: in one, but for very long contexts."""
    if not any(chunk.num_computed_tokens for chunk in chunks):
        return [_varlen_batch(chunks, None)]
    groups, total = [[chunks[0]]], _seq_len(chunks[0])
    for chunk in chunks[1:]:
        total += _seq_len(chunk)
        if total > MAX_GATHERED_TOKENS:
            groups.append([])
            total = _seq_len(chunk)
        groups[-1].append(chunk)
    return [_varlen_batch(group, _context_slots(group, block_size)) for group in groups]


def varlen_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: tuple[Tensor, Tensor],
    groups: list[VarlenBatch],
    *,
    scale: float,
    window: int | None,
) -> list[Tensor]:
    """The outputs [tokens, H, D] by group, of a flat batch: queries [T, H, D], new keys and values [T, K, D], which
    the cached ones of the layer, [blocks, block size, K, D], contain already.
    """
    sides = (-1 if window is None else window - 1, 0)
    outputs = []
    for group in groups:
        keys, values = k[group.tokens], v[group.tokens]
        if group.context_slots is not None:
            keys, values = (states.flatten(0, 1).index_select(0, group.context_slots) for states in layer)
        queries, ends, longest = q[group.tokens], group.cu_seqlens, group.max_seqlens
        outputs.append(
            varlen_attn(queries, keys, values, *ends, *longest, scale=scale, window_size=sides, **_gqa_arguments())
        )
    return outputs


@cache
def _gqa_arguments() -> dict[str, bool]:
    """What allows several query heads to a KV head; torch 2.11 neither knows nor needs it."""
    return {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}


def _seq_len(chunk: PrefillChunk) -> int:
    """Of its row, up to its last token."""
    length: int = chunk.num_computed_tokens + chunk.tokens.stop - chunk.tokens.start
    return length


def _varlen_batch(chunks: list[PrefillChunk], slots: Tensor | None) -> VarlenBatch:
    counts = [chunk.tokens.stop - chunk.tokens.start for chunk in chunks]
    lengths = [_seq_len(chunk) for chunk in chunks]
    ends = [[0, *accumulate(counts)], [0, *accumulate(lengths)]]
    return VarlenBatch(
        slice(chunks[0].tokens.start, chunks[-1].tokens.stop),
        to_device(ends, torch.int32, chunks[0].block_table.device),
        (max(counts), max(lengths)),
        slots,
    )


def _context_slots(chunks: list[PrefillChunk], block_size: int) -> Tensor:
    """Where the tokens of the rows are in the cache, end to end: int64, block * size + offset."""
    blocks = torch.cat([chunk.block_table for chunk in chunks])
    slots = (blocks[:, None] * block_size + torch.arange(block_size, device=blocks.device)).flatten()
    rows = slots.split([len(chunk.block_table) * block_size for chunk in chunks])
    return torch.cat([row[: _seq_len(chunk)] for row, chunk in zip(rows, chunks, strict=True)])
