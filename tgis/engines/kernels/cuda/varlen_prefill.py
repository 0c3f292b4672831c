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
from tgis.engines.paged.batch import Chunk, ChunkGroup

MOST_GATHERED = 1 << 16  # tokens of context copied at a time, if one row alone has not more


def fits(q: Tensor, keys: Tensor, values: Tensor, softcap: float | None, sinks: Tensor | None) -> bool:
    """Whether `prefill_attention` can do this, on a device of compute capability 8.0 or newer."""
    return (
        q.dtype in (torch.float16, torch.bfloat16)
        and q.dtype == keys.dtype == values.dtype
        and q.shape[-1] == values.shape[-1] <= 256
        and q.shape[-1] % 8 == 0
        and softcap is None
        and sinks is None
    )


def make_groups(chunks: list[Chunk], block_size: int) -> list[ChunkGroup]:
    """The chunks in as few calls as the memory for copies allows: in one, but for very long contexts."""
    if not any(chunk.before for chunk in chunks):
        return [_group(chunks, None)]
    groups, total = [[chunks[0]]], _length(chunks[0])
    for chunk in chunks[1:]:
        total += _length(chunk)
        if total > MOST_GATHERED:
            groups.append([])
            total = _length(chunk)
        groups[-1].append(chunk)
    return [_group(group, _slots(group, block_size)) for group in groups]


def prefill_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: tuple[Tensor, Tensor],
    groups: list[ChunkGroup],
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
        if group.slots is not None:
            keys, values = (states.flatten(0, 1).index_select(0, group.slots) for states in layer)
        queries, ends, longest = q[group.tokens], group.ends, group.longest
        outputs.append(
            varlen_attn(queries, keys, values, *ends, *longest, scale=scale, window_size=sides, **_grouped())
        )
    return outputs


@cache
def _grouped() -> dict[str, bool]:
    """What allows several query heads to a KV head; torch 2.11 neither knows nor needs it."""
    return {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}


def _length(chunk: Chunk) -> int:
    """Of its row, up to its last token."""
    length: int = chunk.before + chunk.tokens.stop - chunk.tokens.start
    return length


def _group(chunks: list[Chunk], slots: Tensor | None) -> ChunkGroup:
    counts = [chunk.tokens.stop - chunk.tokens.start for chunk in chunks]
    lengths = [_length(chunk) for chunk in chunks]
    ends = [[0, *accumulate(counts)], [0, *accumulate(lengths)]]
    return ChunkGroup(
        slice(chunks[0].tokens.start, chunks[-1].tokens.stop),
        to_device(ends, torch.int32, chunks[0].blocks.device),
        (max(counts), max(lengths)),
        slots,
    )


def _slots(chunks: list[Chunk], block_size: int) -> Tensor:
    """Where the tokens of the rows are in the cache, end to end: int64, block * size + offset."""
    blocks = torch.cat([chunk.blocks for chunk in chunks])
    slots = (blocks[:, None] * block_size + torch.arange(block_size, device=blocks.device)).flatten()
    rows = slots.split([len(chunk.blocks) * block_size for chunk in chunks])
    return torch.cat([row[: _length(chunk)] for row, chunk in zip(rows, chunks, strict=True)])
