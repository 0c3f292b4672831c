"""The model inputs of one step of the paged engine: a flat batch without padding, uploaded in one copy, and the static
tensors from which replayed steps read theirs.
"""

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tgis.batcher.sequence import Sequence, StepPlan
from tgis.engines.host_memory import Part, upload
from tgis.engines.kernels.attention_inputs import PrefillChunk
from tgis.engines.lora.layers import LoraLayers, PlacedAdapters, lora_of
from tgis.engines.lora.soft_prompts import PromptSpan, flat_spans
from tgis.engines.paged.attention_metadata import AttentionMetadata
from tgis.prompts.lora import LoraAdapter

_NO_METADATA = np.empty(0, np.int64)

# Key of a replayed step: rows, and the version of their adapters' bank (None: no adapters).
StepKey = tuple[int, int | None]
_Step = TypeVar("_Step")
Work = list[tuple[Sequence, range]]  # sequences and the positions that they compute, decodes first


@dataclass
class FlatBatch:
    """The tokens of a step in one row: first the decodes, of one token each, then the prefill chunks."""

    input_ids: Tensor  # int64 [tokens]
    positions: Tensor  # int64 [tokens]
    attention: AttentionMetadata
    logits_indices: Tensor  # int64 [logits]: the tokens whose logits are computed
    spans: list[PromptSpan]  # soft prompts
    all_logits: bool = False  # `logits_indices` are all tokens, in order
    state_slots: Tensor | None = None  # int64 [tokens, 3], as in recurrence.py; None: no recurrent layers
    adapters: PlacedAdapters | None = None  # adapters by token; None: no sequence has an adapter
    step_metadata: Tensor = field(default_factory=lambda: torch.empty(0))  # int64, of the sampler
    encoder: "FlatBatch | None" = None  # inputs to encode before this pass
    cross: AttentionMetadata | None = None  # metadata of cross-attention: slots of the inputs, or one decode per token


class _BlockTables:
    """The block tables of decodes in one array. Most rows stay as they are from step to step: the list of a sequence
    only grows, until the list of another sequence takes its row.
    """

    def __init__(self) -> None:
        self._array: NDArray[np.int64] = np.zeros((0, 0), np.int64)
        self._rows: list[tuple[list[int], int]] = []  # each row's list, and how much of it is in the array

    def rows(self, tables: list[list[int]], width: int) -> NDArray[np.int64]:
        """The first `width` blocks of each table, [tables, width], padded with 0."""
        self._make_room(len(tables), max(map(len, tables), default=0))
        for index, table in enumerate(tables):
            known, count = self._rows[index]
            if known is not table:
                count = 0
                self._array[index] = 0
            if count < len(table):
                self._array[index, count : len(table)] = table[count:]
                self._rows[index] = table, len(table)
        return self._array[: len(tables), :width]

    def _make_room(self, *needed: int) -> None:
        present = self._array.shape
        if any(have < need for have, need in zip(present, needed, strict=True)):
            sizes = (have if have >= need else max(need, 2 * have) for have, need in zip(present, needed, strict=True))
            self._array = np.zeros(tuple(sizes), np.int64)
            self._rows = [([], 0)] * len(self._array)


class BatchBuilder:
    """Makes the batches of an engine."""

    _has_prompt_logprobs = True

    def __init__(self, block_size: int, device: torch.device, lora: LoraLayers, *, has_states: bool = False) -> None:
        self._block_size = block_size
        self._has_states = has_states
        self._device = device
        self._lora = lora
        self._tables = _BlockTables()

    def build(
        self, plan: StepPlan, step_metadata: NDArray[np.int64] = _NO_METADATA
    ) -> tuple[FlatBatch, dict[int, slice]]:
        """The batch of a plan, and the slices of `logits_indices` for prompt logprobs, by request id. The logits of the
        sampled sequences come first, in the plan's order.
        """
        scheduled = zip(plan.seqs, plan.num_scheduled_tokens, strict=True)
        work = [(seq, self._positions(seq, seq.num_computed_tokens, count)) for seq, count in scheduled]
        work.sort(key=lambda item: len(item[1]) > 1)
        ends = dict(zip((seq.id for seq, _ in work), accumulate(len(positions) for _, positions in work), strict=True))
        logits_indices = [ends[seq.id] - 1 for seq in plan.sampled]
        prompt_slices = {}
        for seq, positions in work if self._has_prompt_logprobs else ():
            if seq.wants_prompt_logprobs:
                prompt_slices[seq.id] = slice(len(logits_indices), len(logits_indices) + len(positions))
                logits_indices += range(ends[seq.id] - len(positions), ends[seq.id])
        input_ids = [token for seq, positions in work for token in self._tokens(seq, positions)]
        batch = self._build(work, input_ids, logits_indices, step_metadata)
        batch.spans = list(flat_spans(work))
        return batch, prompt_slices

    def build_next(
        self, seqs: list[Sequence], tokens: Tensor, token_indices: list[int], step_metadata: NDArray[np.int64]
    ) -> FlatBatch:
        """The batch that decodes one more token than the host knows: that of each sequence is in `tokens` on the
        device, at its index.
        """
        work = [(seq, self._positions(seq, len(seq.tokens), 1)) for seq in seqs]
        batch = self._build(work, token_indices, list(range(len(seqs))), step_metadata)
        batch.input_ids = tokens[batch.input_ids]
        return batch

    def _positions(self, _seq: Sequence, start: int, count: int) -> range:
        """The positions of the decoder that are computed with `count` tokens from `start` on."""
        return range(start, start + count)

    def _tokens(self, seq: Sequence, positions: range) -> list[int]:
        """The decoder's tokens at these positions."""
        return seq.tokens[positions.start : positions.stop]

    def _block_table(self, seq: Sequence) -> list[int]:
        """The blocks of the decoder's tokens."""
        return seq.block_table

    def _build(
        self, work: Work, input_ids: list[int], logits_indices: list[int], step_metadata: NDArray[np.int64]
    ) -> FlatBatch:
        """The batch without the spans of soft prompts."""
        size = self._block_size
        decodes = [(seq, positions.stop) for seq, positions in work if len(positions) == 1]
        prefills = [(seq, positions) for seq, positions in work if len(positions) > 1]
        max_blocks = max((-(-seq_len // size) for _, seq_len in decodes), default=0)
        parts: list[Part] = [
            input_ids,
            [p for _, positions in work for p in positions],
            [slot for seq, positions in work for slot in slots(self._block_table(seq), positions, size)],
            self._tables.rows([self._block_table(seq) for seq, _ in decodes], max_blocks),
            [seq_len for _, seq_len in decodes],
            logits_indices,
            step_metadata,
            self._lora.place(adapters_of(work)),
            [number for row in state_slots(work) for number in row] if self._has_states else [],
            *(self._block_table(seq)[: -(-positions.stop // size)] for seq, positions in prefills),
        ]
        on_device = upload(parts, self._device)
        tokens, positions, slot_mapping, tables, seq_lens, indices, metadata, adapters, states, *chunk_tables = (
            on_device
        )
        chunks, start = [], len(decodes)
        for (_, computed), block_table in zip(prefills, chunk_tables, strict=True):
            chunks.append(PrefillChunk(slice(start, start + len(computed)), computed.start, block_table))
            start += len(computed)
        return FlatBatch(
            *(tokens, positions, AttentionMetadata(slot_mapping, tables, seq_lens, chunks), indices),
            spans=[],
            all_logits=logits_indices == list(range(len(input_ids))),
            adapters=self._lora.placed(adapters),
            state_slots=states.view(-1, 3) if self._has_states else None,
            step_metadata=metadata,
        )


def slots(block_table: SequenceOf[int], positions: range, block_size: int) -> list[int]:
    """The slots of the KV cache, counted in tokens, in which the keys and values of these positions are."""
    return [block_table[p // block_size] * block_size + p % block_size for p in positions]


def state_slots(work: Work) -> Iterator[tuple[int, int, int]]:
    """For each token the slots of its sequence's states, as in recurrence.py."""
    for seq, positions in work:
        source = seq.state_source if seq.state_source >= 0 or not positions.start else seq.state_slot
        for position in positions:
            yield source, seq.state_slot, seq.state_saves.get(position, -1)


def adapters_of(work: Work) -> list[LoraAdapter | None]:
    """The LoRA adapter of each token; empty if no sequence has one."""
    adapters = [lora_of(seq) for seq, _ in work]
    if not any(adapters):
        return []
    return [adapter for adapter, (_, positions) in zip(adapters, work, strict=True) for _ in positions]


class StaticInputs:
    """The static tensors from which replayed steps, captured as CUDA graphs or recorded, read their batch.

    Every token is a row, like a sequence that decodes: the tokens of a prompt share its block table, and each sees one
    more. Cross-attention has the blocks and the lengths of the encoded inputs by row.
    """

    def __init__(self, max_rows: int, max_blocks: int, device: torch.device, *, cross_attention: bool = False) -> None:
        """Make room for `max_rows` tokens of sequences of up to `max_blocks` blocks."""
        columns = [torch.zeros(max_rows, dtype=torch.int64, device=device) for _ in range(5)]
        block_tables = torch.zeros(max_rows, max_blocks, dtype=torch.int64, device=device)
        self.max_rows = max_rows
        self._buffers = *columns, block_tables
        self._indices = torch.arange(max_rows, device=device)
        self._state_slots = columns[0].new_full((max_rows, 3), -1)
        self.cross = None
        if cross_attention:
            self.cross = AttentionMetadata.decodes(torch.zeros_like(block_tables), torch.zeros_like(columns[0]))

    def fit(self, batch: FlatBatch) -> bool:
        """Whether the batch has no more tokens than there are rows, and no soft prompts."""
        return not batch.spans and len(batch.input_ids) <= self.max_rows

    def batch(self, size: int, adapter_version: int | None = None) -> FlatBatch:
        """A batch of the first `size` rows, with all logits; its adapters are those of a version of their bank."""
        input_ids, positions, slot_mapping, seq_lens, adapters, tables = (buffer[:size] for buffer in self._buffers)
        return FlatBatch(
            *(input_ids, positions, AttentionMetadata(slot_mapping, tables, seq_lens, []), self._indices[:size], []),
            all_logits=True,
            adapters=None if adapter_version is None else PlacedAdapters(adapters, adapter_version),
            state_slots=self._state_slots[:size],
            cross=self.cross and AttentionMetadata.decodes(self.cross.block_tables[:size], self.cross.seq_lens[:size]),
        )

    def copy_from(self, batch: FlatBatch) -> None:
        """Copy a batch to the first rows."""
        *columns, block_tables = (buffer[: len(batch.input_ids)] for buffer in self._buffers)
        attention = batch.attention
        seq_lens = batch.positions + 1 if attention.chunks else attention.seq_lens
        inputs = [batch.input_ids, batch.positions, attention.slot_mapping, seq_lens]
        inputs += [batch.adapters.first_columns] if batch.adapters else []
        torch._foreach_copy_(columns[: len(inputs)], inputs)  # one kernel
        if batch.state_slots is not None:
            self._state_slots[: len(batch.state_slots)].copy_(batch.state_slots)
        num_decodes, width = attention.block_tables.shape
        block_tables[:num_decodes, :width].copy_(attention.block_tables)
        for chunk in attention.chunks:
            block_tables[chunk.tokens, : len(chunk.block_table)].copy_(chunk.block_table)
        if self.cross and batch.cross:
            num_tokens, width = batch.cross.block_tables.shape
            self.cross.block_tables[:num_tokens, :width].copy_(batch.cross.block_tables)
            self.cross.seq_lens[:num_tokens].copy_(batch.cross.seq_lens)

    def pad(self, first: int, last: int, slot: int) -> None:
        """Make rows `first` to `last` sequences of length 0, whose keys and values go to a slot that nobody reads."""
        _, _, slot_mapping, seq_lens, *_ = self._buffers
        slot_mapping[first:last].fill_(slot)
        seq_lens[first:last].zero_()
        if self.cross:
            self.cross.seq_lens[first:last].zero_()


def without_stale(steps: dict[StepKey, _Step], adapter_version: int | None) -> dict[StepKey, _Step]:
    """The steps that can still be replayed now that the adapters' bank has this version."""
    return {key: step for key, step in steps.items() if key[1] in (None, adapter_version)}
