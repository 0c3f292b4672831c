"""The paged KV cache on the device: keys and values of every layer in blocks, and the flat batch of one step.

Which block belongs to whom is the batcher's business; this turns its block numbers into tensors.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tgis.batcher.sequence import Sequence, StepPlan
from tgis.engines.kernels.transfers import upload
from tgis.engines.lora.layers import lora_of
from tgis.engines.lora.soft_prompts import PromptSpan, flat_spans
from tgis.prompts.lora import LoraAdapter

_NO_METADATA = np.empty(0)


@dataclass(slots=True)
class PrefillChunk:
    """A row of a step that computes more than one token."""

    tokens: slice  # where they are in the flat batch
    num_computed_tokens: int  # tokens that are in the cache already
    block_table: Tensor  # int64 [blocks], of all tokens up to the last of this step
    masks: dict[int | None, Tensor] = field(default_factory=dict)  # by sliding window


@dataclass(frozen=True, slots=True)
class VarlenBatch:
    """Neighbouring chunks, for a body of attention that takes many rows at once."""

    tokens: slice  # where they are in the flat batch
    cu_seqlens: Tensor  # int32 [2, chunks + 1]: cumulative counts of their tokens and of those with context, from 0
    max_seqlens: tuple[int, int]  # the largest of either
    context_slots: (
        Tensor | None
    )  # int64 [tokens with context]: where these are in the cache; None if there is no context


@dataclass(slots=True)
class FlatBatch:
    """One step without padding: a row of tokens, first those of rows with one token each, then the chunks."""

    input_ids: Tensor  # int64 [tokens]
    positions: Tensor  # int64 [tokens]
    slot_mapping: Tensor  # int64 [tokens]: block * size + offset, where their keys and values go
    block_tables: Tensor  # int64 [single rows, most blocks of one], filled up with 0
    seq_lens: Tensor  # int64 [single rows]: tokens of context, the new one included
    chunks: list[PrefillChunk]
    logits_indices: Tensor  # int64 [logits]: the tokens whose logits are wanted
    spans: list[PromptSpan]  # of soft prompts
    adapters: list[LoraAdapter | None] = field(default_factory=list)  # of each token; empty: none has any
    decode_masks: dict[int | None, Tensor] = field(default_factory=dict)  # of the single rows, by sliding window
    varlen_batches: list[VarlenBatch] | None = None  # of the chunks, once a body has wanted them
    kernel_rows: Tensor | None = None  # all of them, likewise, for a body that takes them at once
    step_metadata: Tensor = field(default_factory=lambda: torch.empty(0))  # float64, what else was uploaded with it

    @property
    def num_decodes(self) -> int:
        """Rows with one token."""
        return len(self.seq_lens)


def prepare_inputs(
    plan: StepPlan, block_size: int, device: torch.device, step_metadata: NDArray[np.float64] = _NO_METADATA
) -> tuple[FlatBatch, dict[int, slice]]:
    """The batch of a plan, and where in `kept` the logits of rows are: the last of each sampled row, in the plan's
    order, then all those of rows that want facts about their input tokens, by request id.
    """
    work = sorted(zip(plan.seqs, plan.num_scheduled_tokens, strict=True), key=lambda item: item[1] > 1)
    ids = [
        token for row, count in work for token in row.tokens[row.num_computed_tokens : row.num_computed_tokens + count]
    ]
    ends, total = {}, 0
    for row, count in work:
        total += count
        ends[row.id] = total
    logits_indices = [ends[row.id] - 1 for row in plan.sampled]
    prompt_slices = {}
    for row, count in work:
        if row.request.logprob_options.input_tokens and not row.num_generated_tokens:
            prompt_slices[row.id] = slice(len(logits_indices), len(logits_indices) + count)
            logits_indices += range(ends[row.id] - count, ends[row.id])
    places = [(row, range(row.num_computed_tokens, row.num_computed_tokens + count)) for row, count in work]
    batch = _build_batch(places, ids, logits_indices, step_metadata, block_size, device)
    batch.spans = list(flat_spans(work))
    return batch, prompt_slices


def prepare_next_inputs(
    rows: list[Sequence],
    tokens: Tensor,
    token_indices: list[int],
    block_size: int,
    device: torch.device,
    step_metadata: NDArray[np.float64],
) -> FlatBatch:
    """The batch of the tokens after all that are here: each row's is on the device, at its place in `tokens`."""
    work = [(row, range(len(row.tokens), len(row.tokens) + 1)) for row in rows]
    batch = _build_batch(work, token_indices, list(range(len(rows))), step_metadata, block_size, device)
    batch.input_ids = tokens[batch.input_ids]
    return batch


def _build_batch(
    work: list[tuple[Sequence, range]],
    input_ids: list[int],
    logits_indices: list[int],
    step_metadata: NDArray[np.float64],
    block_size: int,
    device: torch.device,
) -> FlatBatch:
    """The batch of rows and the places that they compute, those with one first; without soft prompts."""
    decodes = [(row, places.stop) for row, places in work if len(places) == 1]
    prefills = [(row, places) for row, places in work if len(places) > 1]
    max_blocks = max((_num_blocks(length, block_size) for _, length in decodes), default=0)
    parts = [
        input_ids,
        [place for _, places in work for place in places],
        [
            row.block_table[place // block_size] * block_size + place % block_size
            for row, places in work
            for place in places
        ],
        [
            block
            for row, _ in decodes
            for block in (*row.block_table[:max_blocks], *[0] * (max_blocks - len(row.block_table)))
        ],
        [length for _, length in decodes],
        logits_indices,
        step_metadata.view(np.int64).ravel().tolist(),
        *(row.block_table[: _num_blocks(places.stop, block_size)] for row, places in prefills),
    ]
    tokens, positions, slots, tables, lengths, wanted, bits, *blocks = upload(parts, device)
    chunks, start = [], len(decodes)
    for (_, places), own in zip(prefills, blocks, strict=True):
        chunks.append(PrefillChunk(slice(start, start + len(places)), places.start, own))
        start += len(places)
    adapters = [lora_of(row) for row, places in work for _ in places] if any(lora_of(row) for row, _ in work) else []
    tables = tables.view(len(decodes), max_blocks)
    bits = bits.view(torch.float64).view(step_metadata.shape)
    return FlatBatch(tokens, positions, slots, tables, lengths, chunks, wanted, [], adapters, step_metadata=bits)


def _num_blocks(tokens: int, size: int) -> int:
    return -(-tokens // size)


class PagedKVCache:
    """Keys and values by layer: [blocks, block size, heads, head size], allocated when a layer is first seen."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._num_blocks = num_blocks
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def __len__(self) -> int:
        return len(self._layers)

    @property
    def bytes_per_block(self) -> int:
        """Over all layers seen."""
        return sum(int(t[0].nbytes) for layer in self._layers.values() for t in layer)

    @property
    def nbytes(self) -> int:
        """Of all layers seen."""
        return self.bytes_per_block * self._num_blocks

    def layer(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of a layer; `key` and `value` [tokens, heads, head size] say of what shape they are."""
        if index not in self._layers:
            self._layers[index] = self._allocate(key), self._allocate(value)
        return self._layers[index]

    def _allocate(self, like: Tensor) -> Tensor:
        # Zeros: what nobody has written yet may be read, and masked, and must be finite.
        return torch.zeros(self._num_blocks, self.block_size, *like.shape[1:], dtype=like.dtype, device=like.device)
