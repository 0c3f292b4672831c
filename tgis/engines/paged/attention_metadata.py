"""The inputs of one attention over the paged KV cache, for all sequences of a step."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from tgis.engines.host_memory import to_device
from tgis.engines.kernels.attention_inputs import PrefillChunk
from tgis.engines.kernels.cuda.varlen_prefill import VarlenBatch


@dataclass
class AttentionMetadata:
    """Where new keys and values go, and which ones each query sees: first the decodes, then the prefill chunks."""

    slot_mapping: Tensor  # int64 [tokens]: block * size + offset
    block_tables: Tensor  # int64 [decodes, max blocks], padded with 0
    seq_lens: Tensor  # int64 [decodes], the new token included
    chunks: list[PrefillChunk]
    decode_masks: dict[Hashable, Tensor] = field(default_factory=dict)  # masks by AttentionParams.mask_key
    varlen_batches: list[VarlenBatch] | None = None  # batches of chunks, made by the first layer that needs them

    @classmethod
    def decodes(cls, block_tables: Tensor, seq_lens: Tensor) -> "AttentionMetadata":
        """One query for each sequence, whose keys and values are in the cache."""
        return cls(seq_lens[:0], block_tables, seq_lens, [])

    @property
    def num_decodes(self) -> int:
        """Number of sequences with one token."""
        return len(self.seq_lens)

    @cached_property
    def chunk_sequences(self) -> Tensor:
        """The prefill chunks for a kernel, int64 [chunks, 4]: first token, number of tokens, sequence length, and the
        address of the block table, which is valid as long as this object exists.
        """
        rows = [[c.tokens.start, c.num_tokens, c.seq_len, c.block_table.data_ptr()] for c in self.chunks]
        return to_device(rows, torch.int64, self.slot_mapping.device)

    @cached_property
    def cpu_sequences(self) -> Tensor:
        """All sequences for the CPU kernel, in the form of `chunk_sequences`."""
        tables, count = self.block_tables, self.num_decodes
        assert tables.is_contiguous()
        assert tables.dtype == torch.int64
        first, row_bytes = tables.data_ptr(), max(tables.shape[1], 1) * tables.itemsize
        addresses = torch.arange(first, first + count * row_bytes, row_bytes)
        ones = torch.ones(count, dtype=torch.int64)
        decodes = torch.stack([torch.arange(count), ones, self.seq_lens, addresses], 1)
        return torch.cat([decodes, self.chunk_sequences]) if self.chunks else decodes
