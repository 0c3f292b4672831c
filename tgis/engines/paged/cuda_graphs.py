"""CUDA graphs of decode steps, captured once for some batch sizes and replayed.

A captured step reads its batch from static tensors. Missing rows are padded with sequences of length 0, whose keys and
values go to a slot that nobody reads. Tokens of short prompts are rows too, since a pass outside of graphs is bound by
its kernel launches. Steps with LoRA adapters are captured when they first occur: they read the matrices from static
tensors as well, but which layers have any is known only then.
"""

import logging
import time
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from tgis.engines.paged.batch import FlatBatch, StaticInputs, StepKey, without_stale
from tgis.engines.paged.self_check import on_all_ranks, verify_steps
from tgis.errors import Unsupported
from tgis.prompts.tensor_file import may_wait
from tgis.utils.progress import watched

log = logging.getLogger(__name__)

# Most tokens that all prompt tokens of a step attend to: each reads its complete context again.
_MAX_ATTENDED_TOKENS = 1 << 16

Replay = Callable[[], None]
Capture = Callable[[Callable[[], Tensor]], tuple[Replay, Tensor]]


def capture_sizes(max_batch_size: int) -> list[int]:
    """Batch sizes to capture, close enough that padding costs little."""
    sizes = {size for size in (1, 2, 4, *range(8, 64, 8), *range(64, max_batch_size, 16)) if size < max_batch_size}
    return sorted(sizes | {max_batch_size})


def cuda_capture() -> Capture:
    """A function that captures on the current CUDA device; all its graphs share their memory."""
    pool = torch.cuda.graph_pool_handle()

    def capture(run: Callable[[], Tensor]) -> tuple[Replay, Tensor]:
        run()  # compiles and selects kernels, which cannot be captured
        try:
            with forbid_synchronization():
                run()
        finally:
            torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):  # others may load adapters
            output = run()
        return graph.replay, output

    return capture


@contextmanager
def forbid_synchronization() -> Iterator[None]:
    """Raise RuntimeError where the block waits for a stream: a capture that fails there breaks torch's allocator."""
    with may_wait:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


class DecodeGraphs:
    """Captured steps by number of rows."""

    def __init__(
        self, forward: Callable[[FlatBatch], Tensor], inputs: StaticInputs, scratch_slot: int, capture_graph: Capture
    ) -> None:
        """Capture all sizes, the largest first, so that the others reuse its memory; Unsupported if the model cannot
        be captured. `scratch_slot` is the cache slot that nobody reads.
        """
        self._forward = forward
        self._inputs = inputs
        self._scratch_slot = scratch_slot
        self._capture_graph: Capture | None = capture_graph  # None: steps with adapters run eagerly
        self._sizes = capture_sizes(inputs.max_rows)
        self._captured: dict[StepKey, tuple[Replay, Tensor]] = {}
        started = time.monotonic()
        log.info("capturing decode steps of 1 to %d sequences", inputs.max_rows)
        with watched("capturing", lambda: len(self._captured), len(self._sizes)):
            for size in reversed(self._sizes):
                inputs.pad(0, size, scratch_slot)
                run = partial(self._logits, size, None)
                self._captured[size, None] = on_all_ranks(partial(capture_graph, run))
        log.info("captured %d decode steps in %.1f s", len(self._sizes), time.monotonic() - started)

    def run(self, batch: FlatBatch) -> Tensor | None:
        """The logits of a batch, which no later call changes; None if there is no graph for such a batch."""
        attended_tokens = sum(chunk.num_tokens * chunk.seq_len for chunk in batch.attention.chunks)
        if not self._inputs.fit(batch) or attended_tokens > _MAX_ATTENDED_TOKENS:
            return None
        count = len(batch.input_ids)
        size = self._sizes[bisect_left(self._sizes, count)]
        self._inputs.copy_from(batch)
        self._inputs.pad(count, size, self._scratch_slot)
        version = batch.adapters.version if batch.adapters else None
        captured = self._find(size, version, may_capture=not batch.attention.chunks)
        if captured is None:
            return None
        replay, output = captured
        replay()
        return output[:count][batch.logits_indices]  # a copy: the next replay overwrites the output

    def _logits(self, size: int, adapters: int | None) -> Tensor:
        """Compute logits in the output of the first graph, the largest: one output for each size would take much
        memory.
        """
        logits = self._forward(self._inputs.batch(size, adapters))  # the captured pass keeps nothing of an earlier one
        largest = self._captured.get((self._sizes[-1], None))
        return largest[1][: len(logits)].copy_(logits) if largest else logits

    def _find(self, size: int, adapters: int | None, *, may_capture: bool) -> tuple[Replay, Tensor] | None:
        """The captured step. A missing one, with adapters, is captured now if it `may_capture`, and None otherwise."""
        captured = self._captured.get((size, adapters))
        if captured is None and may_capture and self._capture_graph:
            run = partial(self._logits, size, adapters)
            try:
                captured = on_all_ranks(partial(_verified, run, self._capture_graph))
            except Unsupported as error:
                log.warning("decode steps with LoRA adapters run without CUDA graphs: %s", error)
                self._capture_graph = None
            else:
                self._captured = without_stale(self._captured, adapters) | {(size, adapters): captured}
        return captured


def _verified(run: Callable[[], Tensor], capture_graph: Capture) -> tuple[Replay, Tensor]:
    """Capture a pass; Unsupported if a replay does not give the same as the pass."""
    eager = run().nan_to_num()  # an adapter may overflow
    replay, output = capture_graph(run)
    replay()
    verify_steps("captured", output.nan_to_num(), eager, output.dtype)
    return replay, output
