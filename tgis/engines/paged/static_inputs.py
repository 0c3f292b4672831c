"""The static tensors from which replayed steps, captured as CUDA graphs or recorded, read their batch.

Every token is a row, like a sequence that decodes: the tokens of a prompt share its block table, and each sees one
more.
"""

from typing import TypeVar

import torch

from tgis.engines.lora.layers import PlacedAdapters
from tgis.engines.paged.batch import FlatBatch

StepKey = tuple[int, int | None]  # number of rows, and the version of their adapters' bank; None: no adapters
_Step = TypeVar("_Step")


def without_stale(steps: dict[StepKey, _Step], adapter_version: int | None) -> dict[StepKey, _Step]:
    """The steps that can still be replayed now that the adapters' bank has this version."""
    return {key: step for key, step in steps.items() if key[1] in (None, adapter_version)}


class StaticInputs:
    """Room for `max_rows` tokens of sequences of up to `max_blocks` blocks."""

    def __init__(self, max_rows: int, max_blocks: int, device: torch.device) -> None:
        columns = [torch.zeros(max_rows, dtype=torch.int64, device=device) for _ in range(5)]
        block_tables = torch.zeros(max_rows, max_blocks, dtype=torch.int64, device=device)
        self._max_rows = max_rows
        self._buffers = *columns, block_tables
        self._indices = torch.arange(max_rows, device=device)

    def fit(self, batch: FlatBatch) -> bool:
        """Whether the batch has no more tokens than there are rows, and no soft prompts."""
        return not batch.spans and len(batch.input_ids) <= self._max_rows

    def batch(self, size: int, adapter_version: int | None = None) -> FlatBatch:
        """A batch of the first `size` rows, with all logits; its adapters are those of a version of their bank."""
        input_ids, positions, slot_mapping, seq_lens, adapters, tables = (buffer[:size] for buffer in self._buffers)
        return FlatBatch(
            *(input_ids, positions, slot_mapping, tables, seq_lens, [], self._indices[:size], []),
            all_logits=True,
            adapters=None if adapter_version is None else PlacedAdapters(adapters, adapter_version),
        )

    def copy_from(self, batch: FlatBatch) -> None:
        """Copy a batch to the first rows."""
        *columns, block_tables = (buffer[: len(batch.input_ids)] for buffer in self._buffers)
        seq_lens = batch.positions + 1 if batch.chunks else batch.seq_lens
        inputs = [batch.input_ids, batch.positions, batch.slot_mapping, seq_lens]
        inputs += [batch.adapters.first_columns] if batch.adapters else []
        torch._foreach_copy_(columns[: len(inputs)], inputs)  # one kernel
        num_decodes, width = batch.block_tables.shape
        block_tables[:num_decodes, :width].copy_(batch.block_tables)
        for chunk in batch.chunks:
            block_tables[chunk.tokens, : len(chunk.block_table)].copy_(chunk.block_table)

    def pad(self, first: int, last: int, slot: int) -> None:
        """Make rows `first` to `last` sequences of length 0, whose keys and values go to a slot that nobody reads."""
        _, _, slot_mapping, seq_lens, *_ = self._buffers
        slot_mapping[first:last].fill_(slot)
        seq_lens[first:last].zero_()
