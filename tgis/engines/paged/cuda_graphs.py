"""CUDA graphs of decode steps: passes of one token a row, recorded once for some numbers of rows and replayed.

A recorded pass reads its batch from tensors that stay where they are; rows that are missing are filled up with rows of
length 0, whose keys and values go to a slot that nobody reads.
"""

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from tgis.engines.paged.batch import FlatBatch
from tgis.utils.log_progress import log_progress

log = logging.getLogger(__name__)

Replay = Callable[[], None]
Capture = Callable[[Callable[[], Tensor]], tuple[Replay, Tensor]]


def capture_sizes(most: int) -> list[int]:
    """Numbers of rows that are worth a graph each: one more row costs little, and so does a graph."""
    sizes = {size for size in (1, 2, 4, *range(8, 64, 8), *range(64, most, 16)) if size < most}
    return sorted(sizes | {most})


def cuda_capture() -> Capture:
    """Records on the current CUDA device; all its graphs share their memory."""
    pool = torch.cuda.graph_pool_handle()

    def capture(run: Callable[[], Tensor]) -> tuple[Replay, Tensor]:
        run()  # kernels are compiled and chosen now: none of that can be recorded
        with _forbid_synchronization():
            run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            output = run()
        return graph.replay, output

    return capture


@contextmanager
def _forbid_synchronization() -> Iterator[None]:
    """RuntimeError for what waits for the device: torch's allocator is not the same after a recording that failed."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class DecodeGraphs:
    """Recorded passes by number of rows; empty until `record`."""

    def __init__(
        self, forward: Callable[[FlatBatch], Tensor], max_batch_size: int, max_blocks: int, scratch_slot: int
    ) -> None:
        """Up to `rows` rows of up to `width` blocks; `scratch` is the slot that nobody reads."""
        self._forward = forward
        self._scratch_slot = scratch_slot
        self._max_batch_size = max_batch_size
        self._max_blocks = max_blocks
        self._capture_sizes: list[int] = []
        self._captured: dict[int, tuple[Replay, Tensor]] = {}
        self._buffers: tuple[Tensor, ...] = ()

    def capture(self, capture_graph: Capture, device: torch.device) -> None:
        """Record passes of all sizes, the largest first, so that the others find their memory; RuntimeError if the
        model does what cannot be recorded.
        """
        rows = [torch.zeros(self._max_batch_size, dtype=torch.int64, device=device) for _ in range(4)]
        tables = torch.zeros(self._max_batch_size, self._max_blocks, dtype=torch.int64, device=device)
        self._buffers = *rows, tables, torch.arange(self._max_batch_size, device=device)
        sizes = capture_sizes(self._max_batch_size)
        started = time.monotonic()
        log.info("recording decode steps of 1 to %d rows", self._max_batch_size)
        with log_progress(lambda: f"{len(self._captured)} of {len(sizes)} recorded"):
            for size in reversed(sizes):
                self._reset_padding(0, size)
                self._captured[size] = capture_graph(lambda size=size: self._forward(self._static_batch(size)))  # type: ignore[misc]
        log.info("recorded %d decode steps in %.1f s", len(sizes), time.monotonic() - started)
        self._capture_sizes = sizes

    def run(self, batch: FlatBatch) -> Tensor | None:
        """Those of a batch, which no later call changes; None if it is not of a recorded kind."""
        count = batch.num_decodes
        others = batch.chunks or batch.spans or batch.adapters
        if not self._capture_sizes or others or count > self._max_batch_size or len(batch.logits_indices) != count:
            return None
        size = self._capture_sizes[bisect_left(self._capture_sizes, count)]
        self._copy_inputs(batch, size)
        replay, output = self._captured[size]
        replay()
        return output[:count][batch.logits_indices]  # a copy: the next replay writes to the same place

    def _static_batch(self, size: int) -> FlatBatch:
        ids, positions, slots, lengths, tables, kept = self._buffers
        return FlatBatch(ids[:size], positions[:size], slots[:size], tables[:size], lengths[:size], [], kept[:size], [])

    def _copy_inputs(self, batch: FlatBatch, size: int) -> None:
        ids, positions, slots, lengths, tables, _ = self._buffers
        count, width = batch.block_tables.shape
        given = (
            (ids, batch.input_ids),
            (positions, batch.positions),
            (slots, batch.slot_mapping),
            (lengths, batch.seq_lens),
        )
        for buffer, values in given:
            buffer[:count].copy_(values)
        tables[:count, :width].copy_(batch.block_tables)
        self._reset_padding(count, size)

    def _reset_padding(self, first: int, last: int) -> None:
        ids, positions, slots, lengths, tables, _ = self._buffers
        for buffer in (ids, positions, lengths, tables):
            buffer[first:last].zero_()
        slots[first:last].fill_(self._scratch_slot)
