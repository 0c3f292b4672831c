"""Batches of prompt chunks with their keys and values in a paged cache, and the attention output expected for them."""

from dataclasses import dataclass

import torch
from attention_oracle import reference_attention
from torch import Tensor

from tgis.engines.kernels.attention_inputs import AttentionParams, PrefillChunk
from tgis.engines.paged.attention_metadata import AttentionMetadata

BLOCK = 16


@dataclass
class ChunkedBatch:
    batch: AttentionMetadata
    q: Tensor
    k: Tensor
    v: Tensor
    layer: tuple[Tensor, Tensor]
    contexts: list[tuple[Tensor, Tensor]]  # keys and values of each chunk's whole context

    def set_contexts(self, keys: Tensor, values: Tensor) -> None:
        """Keys and values in the blocks of a layer are others."""
        tables = [(chunk.block_table, chunk.seq_len) for chunk in self.batch.chunks]
        self.contexts = [
            (keys[table].flatten(0, 1)[:length], values[table].flatten(0, 1)[:length]) for table, length in tables
        ]

    def prefill_inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
        """Arguments of the Triton kernel."""
        most = max(chunk.num_tokens for chunk in self.batch.chunks)
        return self.q[self.batch.num_decodes :], *self.layer, self.batch.chunk_sequences, most

    def expected(self, rules: AttentionParams) -> Tensor:
        """The oracle's output [tokens, H, E], decodes excluded."""
        return torch.cat(
            [
                reference_attention(self.q[chunk.tokens], k, v, rules)
                for chunk, (k, v) in zip(self.batch.chunks, self.contexts, strict=True)
            ]
        )


def chunk_batch(
    rows: list[tuple[int, int]],
    heads: int,
    kv_heads: int,
    size: int,
    dtype: torch.dtype,
    device: str = "cpu",
    v_size: int | None = None,
) -> ChunkedBatch:
    """One chunk for each (cached tokens, new tokens), after two decodes that are ignored; values are as wide as keys
    unless `v_size` says something else.
    """
    v_size = v_size or size
    generator = torch.Generator().manual_seed(0)
    widths = [-(-(before + count) // BLOCK) for before, count in rows]
    numbers = torch.randperm(sum(widths) + 3, generator=generator)[: sum(widths)].to(device).split(widths)
    total = 2 + sum(count for _, count in rows)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    q, k, v = random(total, heads, size), random(total, kv_heads, size), random(total, kv_heads, v_size)
    layer = random(sum(widths) + 3, BLOCK, kv_heads, size), random(sum(widths) + 3, BLOCK, kv_heads, v_size)
    chunks, contexts, start = [], [], 2
    for (before, count), blocks in zip(rows, numbers, strict=True):
        chunks.append(PrefillChunk(slice(start, start + count), before, blocks))
        places = torch.arange(before, before + count, device=device)
        for stored, new in zip(layer, (k, v), strict=True):
            stored[blocks[places // BLOCK], places % BLOCK] = new[start : start + count]
        keys, values = (stored[blocks].flatten(0, 1)[: before + count] for stored in layer)
        contexts.append((keys, values))
        start += count
    nothing = torch.zeros(0, dtype=torch.int64, device=device)
    lengths = torch.ones(2, dtype=torch.int64, device=device)
    batch = AttentionMetadata(nothing, lengths[:, None], lengths, chunks)
    return ChunkedBatch(batch, q, k, v, layer, contexts)
