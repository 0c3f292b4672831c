"""The inputs of attention kernels."""

from collections.abc import Hashable
from dataclasses import KW_ONLY, dataclass, field

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tgis.engines.host_memory import to_device

BIAS_PADDING = 32  # columns that are read, and masked, where keys and queries are computed in blocks


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """The parameters of one layer's attention."""

    scale: float
    window: int | None = None  # tokens that a token sees, itself included
    softcap: float | None = None
    sinks: Tensor | None = None  # [heads]: logits that take part in the softmax and add nothing
    bias: Tensor | None = None  # float32 [heads, columns + BIAS_PADDING], added to the scaled scores
    bias_origin: int | None = None  # the column of a token's own key; None: columns are the positions of keys
    _: KW_ONLY
    causal: bool = True  # False: a token sees later ones, too, up to the last of its sequence; there is no window then
    key_scales: Tensor | None = None  # float32 [K, D]: what keys in codes were divided by

    @property
    def kind(self) -> tuple[Hashable, ...]:
        """The properties that kernels are specialized for."""
        bias = self.bias is None, self.bias_origin
        return self.window is None, self.softcap, self.sinks is None, *bias, self.causal

    @property
    def mask_key(self) -> Hashable:
        """What masks, with the bias in them, depend on."""
        return self.window, self.causal, None if self.bias is None else self.bias.data_ptr()


@dataclass(slots=True)
class PrefillChunk:
    """A sequence that computes more than one token in a step."""

    tokens: slice  # of the flat batch
    num_computed_tokens: int  # already in the cache
    block_table: Tensor  # int64 [blocks], of all tokens up to the last of this step
    masks: dict[Hashable, Tensor] = field(default_factory=dict)  # by AttentionParams.mask_key

    @property
    def num_tokens(self) -> int:
        """Number of new tokens."""
        count: int = self.tokens.stop - self.tokens.start
        return count

    @property
    def seq_len(self) -> int:
        """Length of the sequence up to the last token of this step."""
        return self.num_computed_tokens + self.num_tokens


@dataclass(frozen=True, slots=True)
class PagedChunks:
    """The prefill chunks of a flat batch as tensors."""

    tokens: slice  # of the flat batch
    cu_seqlens: Tensor  # int32 [chunks + 1]: cumulative numbers of queries, from 0
    seq_lens: Tensor  # int32 [chunks]
    block_tables: Tensor  # int64 [chunks, max blocks], padded with 0
    max_tokens: int  # of a chunk


def make_paged_chunks(chunks: list[PrefillChunk]) -> PagedChunks:
    device, start = chunks[0].block_table.device, chunks[0].tokens.start
    ends = [chunk.tokens.stop - start for chunk in chunks]
    lengths = to_device([0, *ends, *(chunk.seq_len for chunk in chunks)], torch.int32, device)
    block_tables = pad_sequence([chunk.block_table for chunk in chunks], batch_first=True)
    most = max(chunk.num_tokens for chunk in chunks)
    split = len(chunks) + 1
    return PagedChunks(slice(start, start + ends[-1]), lengths[:split], lengths[split:], block_tables, most)
