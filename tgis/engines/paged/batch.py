"""The paged KV cache on the device: keys and values of every layer in blocks, and the flat batch of one step.

Which block belongs to whom is the batcher's business; this turns its block numbers into tensors.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tgis.batcher.sequence import Plan, Sequence
from tgis.engines.kernels.transfers import upload
from tgis.engines.lora.layers import lora_of
from tgis.engines.lora.soft_prompts import Span, flat_spans
from tgis.prompts.lora import LoraAdapter

_NONE = np.empty(0)


@dataclass(slots=True)
class Chunk:
    """A row of a step that computes more than one token."""

    tokens: slice  # where they are in the flat batch
    before: int  # tokens that are in the cache already
    blocks: Tensor  # int64 [blocks], of all tokens up to the last of this step
    masks: dict[int | None, Tensor] = field(default_factory=dict)  # by sliding window


@dataclass(frozen=True, slots=True)
class ChunkGroup:
    """Neighbouring chunks, for a body of attention that takes many rows at once."""

    tokens: slice  # where they are in the flat batch
    ends: Tensor  # int32 [2, chunks + 1]: cumulative counts of their tokens and of those with context, from 0
    longest: tuple[int, int]  # the largest of either
    slots: Tensor | None  # int64 [tokens with context]: where these are in the cache; None if there is no context


@dataclass(slots=True)
class FlatBatch:
    """One step without padding: a row of tokens, first those of rows with one token each, then the chunks."""

    ids: Tensor  # int64 [tokens]
    positions: Tensor  # int64 [tokens]
    slots: Tensor  # int64 [tokens]: block * size + offset, where their keys and values go
    tables: Tensor  # int64 [single rows, most blocks of one], filled up with 0
    lengths: Tensor  # int64 [single rows]: tokens of context, the new one included
    chunks: list[Chunk]
    kept: Tensor  # int64 [logits]: the tokens whose logits are wanted
    spans: list[Span]  # of soft prompts
    adapters: list[LoraAdapter | None] = field(default_factory=list)  # of each token; empty: none has any
    masks: dict[int | None, Tensor] = field(default_factory=dict)  # of the single rows, by sliding window
    groups: list[ChunkGroup] | None = None  # of the chunks, once a body has wanted them
    rows: Tensor | None = None  # all of them, likewise, for a body that takes them at once
    numbers: Tensor = field(default_factory=lambda: torch.empty(0))  # float64, what else was uploaded with it

    @property
    def singles(self) -> int:
        """Rows with one token."""
        return len(self.lengths)


def flat_batch(
    plan: Plan, block_size: int, device: torch.device, numbers: NDArray[np.float64] = _NONE
) -> tuple[FlatBatch, dict[int, slice]]:
    """The batch of a plan, and where in `kept` the logits of rows are: the last of each sampled row, in the plan's
    order, then all those of rows that want facts about their input tokens, by request id.
    """
    work = sorted(zip(plan.rows, plan.counts, strict=True), key=lambda item: item[1] > 1)
    ids = [token for row, count in work for token in row.tokens[row.computed : row.computed + count]]
    ends, total = {}, 0
    for row, count in work:
        total += count
        ends[row.id] = total
    kept = [ends[row.id] - 1 for row in plan.sampled]
    explained = {}
    for row, count in work:
        if row.request.details.inputs and not row.generated:
            explained[row.id] = slice(len(kept), len(kept) + count)
            kept += range(ends[row.id] - count, ends[row.id])
    places = [(row, range(row.computed, row.computed + count)) for row, count in work]
    batch = _uploaded(places, ids, kept, numbers, block_size, device)
    batch.spans = list(flat_spans(work))
    return batch, explained


def next_batch(
    rows: list[Sequence],
    tokens: Tensor,
    places: list[int],
    block_size: int,
    device: torch.device,
    numbers: NDArray[np.float64],
) -> FlatBatch:
    """The batch of the tokens after all that are here: each row's is on the device, at its place in `tokens`."""
    work = [(row, range(len(row.tokens), len(row.tokens) + 1)) for row in rows]
    batch = _uploaded(work, places, list(range(len(rows))), numbers, block_size, device)
    batch.ids = tokens[batch.ids]
    return batch


def _uploaded(
    work: list[tuple[Sequence, range]],
    ids: list[int],
    kept: list[int],
    numbers: NDArray[np.float64],
    size: int,
    device: torch.device,
) -> FlatBatch:
    """The batch of rows and the places that they compute, those with one first; without soft prompts."""
    single = [(row, places.stop) for row, places in work if len(places) == 1]
    longer = [(row, places) for row, places in work if len(places) > 1]
    widest = max((_blocks(length, size) for _, length in single), default=0)
    parts = [
        ids,
        [place for _, places in work for place in places],
        [row.blocks[place // size] * size + place % size for row, places in work for place in places],
        [block for row, _ in single for block in (*row.blocks[:widest], *[0] * (widest - len(row.blocks)))],
        [length for _, length in single],
        kept,
        numbers.view(np.int64).ravel().tolist(),
        *(row.blocks[: _blocks(places.stop, size)] for row, places in longer),
    ]
    tokens, positions, slots, tables, lengths, wanted, bits, *blocks = upload(parts, device)
    chunks, start = [], len(single)
    for (_, places), own in zip(longer, blocks, strict=True):
        chunks.append(Chunk(slice(start, start + len(places)), places.start, own))
        start += len(places)
    adapters = [lora_of(row) for row, places in work for _ in places] if any(lora_of(row) for row, _ in work) else []
    tables = tables.view(len(single), widest)
    bits = bits.view(torch.float64).view(numbers.shape)
    return FlatBatch(tokens, positions, slots, tables, lengths, chunks, wanted, [], adapters, numbers=bits)


def _blocks(tokens: int, size: int) -> int:
    return -(-tokens // size)


class PagedCache:
    """Keys and values by layer: [blocks, block size, heads, head size], allocated when a layer is first seen."""

    def __init__(self, blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._blocks = blocks
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def __len__(self) -> int:
        return len(self._layers)

    @property
    def bytes_per_block(self) -> int:
        """Over all layers seen."""
        return sum(int(t[0].nbytes) for layer in self._layers.values() for t in layer)

    @property
    def held_bytes(self) -> int:
        """Of all layers seen."""
        return self.bytes_per_block * self._blocks

    def layer(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of a layer; `key` and `value` [tokens, heads, head size] say of what shape they are."""
        if index not in self._layers:
            self._layers[index] = self._empty(key), self._empty(value)
        return self._layers[index]

    def _empty(self, like: Tensor) -> Tensor:
        # Zeros: what nobody has written yet may be read, and masked, and must be finite.
        return torch.zeros(self._blocks, self.block_size, *like.shape[1:], dtype=like.dtype, device=like.device)
