"""The tensors that decode steps read their batch from when they are replayed: captured as CUDA graphs, or recorded."""

import torch

from tgis.engines.paged.batch import FlatBatch


class StaticInputs:
    """Room for `max_batch_size` sequences of up to `max_blocks` blocks."""

    def __init__(self, max_batch_size: int, max_blocks: int, device: torch.device) -> None:
        columns = [torch.zeros(max_batch_size, dtype=torch.int64, device=device) for _ in range(4)]
        block_tables = torch.zeros(max_batch_size, max_blocks, dtype=torch.int64, device=device)
        self._max_batch_size = max_batch_size
        self._buffers = *columns, block_tables
        self._indices = torch.arange(max_batch_size, device=device)

    def fit(self, batch: FlatBatch) -> bool:
        """Whether the batch is of plain decodes, all of whose logits are wanted."""
        count = batch.num_decodes
        others = batch.chunks or batch.spans or batch.adapters
        return not others and count <= self._max_batch_size and len(batch.logits_indices) == count

    def batch(self, size: int) -> FlatBatch:
        """The first `size` sequences, whose logits are in their order."""
        input_ids, positions, slot_mapping, seq_lens, tables = (buffer[:size] for buffer in self._buffers)
        indices = self._indices[:size]
        return FlatBatch(input_ids, positions, slot_mapping, tables, seq_lens, [], indices, [], all_logits=True)

    def copy_from(self, batch: FlatBatch) -> None:
        """Make it the first sequences."""
        *columns, block_tables = self._buffers
        count, width = batch.block_tables.shape
        inputs = batch.input_ids, batch.positions, batch.slot_mapping, batch.seq_lens
        for column, values in zip(columns, inputs, strict=True):
            column[:count].copy_(values)
        block_tables[:count, :width].copy_(batch.block_tables)

    def pad(self, first: int, last: int, slot: int) -> None:
        """Make others sequences of length 0, whose keys and values go to a slot that nobody reads."""
        for buffer in self._buffers:
            buffer[first:last].zero_()
        slot_mapping = self._buffers[2]
        slot_mapping[first:last].fill_(slot)
