"""Steps with prompt chunks on CPUs, recorded once for any numbers of tokens, sequences and logits, and replayed.

The pass is recorded when the first such step comes, which is computed both ways: the bits must be the same, since which
steps are replayed depends on what else is in the batch.
"""

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from tgis.engines.kernels.cpu.recording import Recorder, ResizablePass
from tgis.engines.paged.batch import FlatBatch
from tgis.errors import Unsupported

log = logging.getLogger(__name__)

_MIN_SIZE = 2  # so that a size which is smaller by 1 is still a size


class RecordedPrefill:
    """The recorded pass of one engine. Steps with soft prompts, adapters or many logits run eagerly, and so do models
    that need operators of PyTorch.
    """

    def __init__(
        self, forward: Callable[[FlatBatch], Tensor], recorder: Recorder, max_tokens: int, max_rows: int
    ) -> None:
        """Steps have up to `max_tokens` tokens, of `max_rows` sequences, and give as many logits at the most."""
        self._forward = forward
        self._recorder = recorder
        self._largest = max(max_tokens, _MIN_SIZE), max(max_rows, _MIN_SIZE), max(max_rows, _MIN_SIZE)
        tokens, rows, logits = self._largest
        self._inputs = tuple(torch.zeros(tokens, dtype=torch.int64) for _ in range(3))  # as in FlatBatch
        self._sequences = torch.zeros(rows, 4, dtype=torch.int64)
        self._logits_indices = torch.zeros(logits, dtype=torch.int64)
        self._pass: tuple[ResizablePass, Tensor] | None = None
        self._enabled = True

    def run(self, batch: FlatBatch) -> Tensor | None:
        """The logits of a batch, until the next call; None if it has to run eagerly."""
        sizes = len(batch.input_ids), len(batch.cpu_sequences), len(batch.logits_indices)
        fits = all(size <= most for size, most in zip(sizes, self._largest, strict=True))
        if not self._enabled or not fits or batch.spans or batch.adapters:
            return None
        try:
            return self._run(batch, sizes)
        except Exception as error:  # noqa: BLE001 - whatever fails here, an eager step may not
            self._enabled, self._pass = False, None
            text = error if isinstance(error, Unsupported) else repr(error)
            log.warning("steps with prompts are not recorded: %s", text)
            return None

    def _run(self, batch: FlatBatch, sizes: tuple[int, int, int]) -> Tensor:
        is_new = self._pass is None
        replay, logits = self._pass = self._pass or self._recorder.record_resizable(self._record, self._largest)
        inputs = batch.input_ids, batch.positions, batch.slot_mapping, batch.cpu_sequences, batch.logits_indices
        for static, new in zip((*self._inputs, self._sequences, self._logits_indices), inputs, strict=True):
            static[: len(new)].copy_(new)
        replay(sizes)
        logits = logits[: sizes[-1]]
        if is_new and not torch.equal(self._forward(batch).nan_to_num(), logits.nan_to_num()):
            raise Unsupported("a recorded step does not give the logits of an eager one")
        return logits

    def _record(self, sizes: tuple[int, ...]) -> Tensor:
        tokens, rows, logits = sizes
        none = torch.empty(0, dtype=torch.int64)
        ids, positions, slots = (each[:tokens] for each in self._inputs)
        batch = FlatBatch(ids, positions, slots, none[:, None], none, [], self._logits_indices[:logits], [])
        batch.cpu_sequences = self._sequences[:rows]
        return self._forward(batch)
