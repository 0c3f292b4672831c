"""The tensors that decode steps read their batch from when they are replayed: captured as CUDA graphs, or recorded."""

from typing import TypeVar

import torch

from tgis.engines.lora.layers import PlacedAdapters
from tgis.engines.paged.batch import FlatBatch

StepKey = tuple[int, int | None]  # number of sequences, and the version of their adapters' bank; None: no adapters
_Step = TypeVar("_Step")


def without_stale(steps: dict[StepKey, _Step], adapter_version: int | None) -> dict[StepKey, _Step]:
    """Those that can be replayed, now that the adapters' bank has this version."""
    return {key: step for key, step in steps.items() if key[1] in (None, adapter_version)}


class StaticInputs:
    """Room for `max_batch_size` sequences of up to `max_blocks` blocks."""

    def __init__(self, max_batch_size: int, max_blocks: int, device: torch.device) -> None:
        columns = [torch.zeros(max_batch_size, dtype=torch.int64, device=device) for _ in range(5)]
        block_tables = torch.zeros(max_batch_size, max_blocks, dtype=torch.int64, device=device)
        self._max_batch_size = max_batch_size
        self._buffers = *columns, block_tables
        self._indices = torch.arange(max_batch_size, device=device)

    def fit(self, batch: FlatBatch) -> bool:
        """Whether the batch is of plain decodes, all of whose logits are wanted."""
        count = batch.num_decodes
        others = batch.chunks or batch.spans
        return not others and count <= self._max_batch_size and len(batch.logits_indices) == count

    def batch(self, size: int, adapter_version: int | None = None) -> FlatBatch:
        """The first `size` sequences, whose logits are in their order; with adapters of a version of their bank."""
        input_ids, positions, slot_mapping, seq_lens, adapters, tables = (buffer[:size] for buffer in self._buffers)
        return FlatBatch(
            *(input_ids, positions, slot_mapping, tables, seq_lens, [], self._indices[:size], []),
            all_logits=True,
            adapters=None if adapter_version is None else PlacedAdapters(adapters, adapter_version),
        )

    def copy_from(self, batch: FlatBatch) -> None:
        """Make it the first sequences."""
        count, width = batch.block_tables.shape
        *columns, block_tables = (buffer[:count] for buffer in self._buffers)
        inputs = [batch.input_ids, batch.positions, batch.slot_mapping, batch.seq_lens]
        inputs += [batch.adapters.first_columns] if batch.adapters else []
        torch._foreach_copy_(columns[: len(inputs)], inputs)  # one kernel
        block_tables[:, :width].copy_(batch.block_tables)

    def pad(self, first: int, last: int, slot: int) -> None:
        """Make others sequences of length 0, whose keys and values go to a slot that nobody reads."""
        _, _, slot_mapping, seq_lens, *_ = self._buffers
        slot_mapping[first:last].fill_(slot)
        seq_lens[first:last].zero_()
