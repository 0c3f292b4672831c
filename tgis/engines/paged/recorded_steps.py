"""Steps on CPUs, recorded when they first occur, and replayed: decodes for each number of sequences, steps with prompt
chunks once for any numbers of tokens, sequences and logits. Decodes with LoRA adapters are recorded anew whenever other
adapters come or go.

A recording is verified by computing a step both ways. The bits must be the same, since which steps are replayed depends
on what else is in the batch.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tgis.engines.kernels.cpu.library import CpuKernels
from tgis.engines.kernels.cpu.recording import RecordedPass, Recorder, ResizablePass
from tgis.engines.paged.batch import FlatBatch, StaticInputs, StepKey, without_stale
from tgis.errors import Unsupported

log = logging.getLogger(__name__)

_MIN_SIZE = 2  # so that a size which is smaller by 1 is still a size


@dataclass(slots=True)
class _RecordedStep:
    replay: RecordedPass
    logits: Tensor
    verified: bool = False


class RecordedSteps:
    """The recorded steps of one engine. A model that cannot be recorded runs eagerly."""

    def __init__(
        self, forward: Callable[[FlatBatch], Tensor], kernels: CpuKernels, inputs: StaticInputs, max_prefill_tokens: int
    ) -> None:
        """Steps have up to `max_prefill_tokens` tokens of prompts, beside the decodes that `inputs` have rows for."""
        self._forward = forward
        self._recorder = Recorder(kernels)
        self._inputs = inputs
        self._sequences = inputs.batch(inputs.max_rows).cpu_sequences
        self._cross_sequences = inputs.cross.cpu_sequences if inputs.cross else torch.empty(0, 4)
        self._steps: dict[StepKey, _RecordedStep] = {}
        self._enabled = True
        tokens = max_prefill_tokens + inputs.max_rows
        self._prefill = RecordedPrefill(forward, self._recorder, tokens, inputs.max_rows)

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
