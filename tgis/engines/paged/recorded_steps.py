"""Decode steps on CPUs, recorded for each number of sequences when it first occurs, and replayed. Steps with LoRA
adapters are recorded anew whenever other adapters come or go.

A recorded step is verified by computing the next one both ways. The bits must be the same, since which steps are
replayed depends on what else is in the batch.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tgis.engines.kernels.cpu.library import CpuKernels
from tgis.engines.kernels.cpu.recording import RecordedPass, Recorder
from tgis.engines.paged.batch import FlatBatch, StaticInputs, StepKey, without_stale
from tgis.engines.paged.recorded_prefill import RecordedPrefill
from tgis.errors import Unsupported

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _RecordedStep:
    replay: RecordedPass
    logits: Tensor
    verified: bool = False


class RecordedSteps:
    """The recorded steps of one engine. A model that cannot be recorded runs eagerly."""

    def __init__(
        self,
        forward: Callable[[FlatBatch], Tensor],
        kernels: CpuKernels,
        max_batch_size: int,
        max_blocks: int,
        max_prefill_tokens: int,
        *,
        cross_attention: bool = False,
    ) -> None:
        """Sequences have up to `max_blocks` blocks, steps up to `max_prefill_tokens` tokens of prompts."""
        self._forward = forward
        self._recorder = Recorder(kernels)
        self._inputs = StaticInputs(max_batch_size, max_blocks, torch.device("cpu"), cross_attention=cross_attention)
        self._sequences = self._inputs.batch(max_batch_size).cpu_sequences
        cross = self._inputs.cross
        self._cross_sequences = cross.cpu_sequences if cross else torch.empty(0, 4)
        self._steps: dict[StepKey, _RecordedStep] = {}
        self._enabled = True
        tokens = max_prefill_tokens + max_batch_size
        self._prefill = RecordedPrefill(forward, self._recorder, tokens, max_batch_size)

    def run(self, batch: FlatBatch) -> Tensor | None:
        """The logits of a batch, until the next call; None if it has to run eagerly."""
        if batch.chunks:
            return None if batch.cross else self._prefill.run(batch)
        is_decode = len(batch.logits_indices) == batch.num_decodes
        if not self._enabled or not is_decode or not self._inputs.fit(batch):
            return None
        self._inputs.copy_from(batch)
        self._sequences[: batch.num_decodes, 2] = batch.seq_lens
        if batch.cross:
            self._cross_sequences[: batch.num_decodes, 2] = batch.cross.seq_lens
        try:
            logits = self._run(batch.num_decodes, batch.adapters.version if batch.adapters else None)
        except Exception as error:  # noqa: BLE001 - whatever fails here, an eager step may not
            self._enabled = False
            self._steps.clear()
            log.warning("decode steps are not recorded: %s", error if isinstance(error, Unsupported) else repr(error))
            return None
        return logits if batch.all_logits else logits[batch.logits_indices]

    def _run(self, count: int, adapters: int | None) -> Tensor:
        batch = self._inputs.batch(count, adapters)
        batch.cpu_sequences = self._sequences[:count]
        if batch.cross:
            batch.cross.cpu_sequences = self._cross_sequences[:count]
        step = self._steps.get((count, adapters))
        if step is None:
            if adapters is not None:
                self._steps = without_stale(self._steps, adapters)
            self._steps[count, adapters] = step = _RecordedStep(*self._recorder.record(lambda: self._forward(batch)))
        elif step.verified:
            step.replay()
        else:
            eager = self._forward(batch)
            step.replay()
            if not torch.equal(eager.nan_to_num(), step.logits.nan_to_num()):
                raise Unsupported("a recorded step does not give the logits of an eager one")
            step.verified = True
        return step.logits
