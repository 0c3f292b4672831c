"""Steps on CPUs, recorded when they first occur, and replayed.

Decodes are recorded for each number of sequences, those with LoRA adapters again whenever other adapters come or go.
Steps with prompt chunks are recorded once for any numbers of tokens, sequences and logits.

A recording is verified by computing a step both ways. The bits must be the same, since which steps are replayed depends
on what else is in the batch.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from tgis.engines.kernels.cpu.library import CpuKernels
from tgis.engines.kernels.cpu.recording import Recorder
from tgis.engines.kernels.cpu.replay import RecordedPass, ResizablePass
from tgis.engines.paged.attention_metadata import AttentionMetadata
from tgis.engines.paged.batch import FlatBatch, StaticInputs, StepKey, without_stale
from tgis.engines.paged.states import RecurrentStates
from tgis.errors import Unsupported

log = logging.getLogger(__name__)

_MIN_SIZE = 2  # so that a size which is smaller by 1 is still a size
_PAUSE = 1000  # eager steps after one that failed for lack of memory or the like
_OTHER_LOGITS = "a recorded step does not give the logits of an eager one"
Forward = Callable[[FlatBatch], Tensor]
Replay = Callable[[FlatBatch], Tensor | None]  # the logits until the next call; None: the batch has to run eagerly


class RecordedSteps:
    """The recorded steps of one engine. A model that cannot be recorded runs eagerly."""

    def __init__(
        self,
        forward: Forward,
        kernels: CpuKernels,
        inputs: StaticInputs,
        max_prefill_tokens: int,
        states: RecurrentStates | None = None,
    ) -> None:
        """Steps have up to `max_prefill_tokens` tokens of prompts, beside the decodes that `inputs` have rows for."""
        tokens, rows = max_prefill_tokens + inputs.max_rows, inputs.max_rows
        self._decodes = _Attempts(
            "decode steps", lambda: RecordedDecodes(forward, Recorder(kernels), inputs, states).run
        )
        self._prefills = _Attempts(
            "steps with prompts", lambda: RecordedPrefill(forward, Recorder(kernels), tokens, rows).run
        )

    def run(self, batch: FlatBatch) -> Tensor | None:
        """The logits of a batch, until the next call; None if it has to run eagerly."""
        if batch.attention.chunks:
            return self._prefills.run(batch) if batch.state_slots is None else None
        return self._decodes.run(batch)


class _Attempts:
    """Records and replays steps of one kind for as long as that works."""

    def __init__(self, kind: str, make: Callable[[], Replay]) -> None:
        self._kind, self._make = kind, make
        self._replay: Replay | None = None
        self._num_eager = 0.0  # steps to run eagerly before another attempt
        self._has_paused = False

    def run(self, batch: FlatBatch) -> Tensor | None:
        if self._num_eager:
            self._num_eager -= 1
            return None
        try:
            self._replay = self._replay or self._make()
            return self._replay(batch)
        except Exception as error:  # noqa: BLE001 - whatever fails here, an eager step may not
            self._stop(error)
            return None

    def _stop(self, error: Exception) -> None:
        """Free the recordings: for good if the model cannot be recorded, else until some steps have run."""
        self._replay = None
        if isinstance(error, Unsupported):
            self._num_eager = inf
            log.warning("%s are not recorded: %s", self._kind, error)
        else:
            self._num_eager = _PAUSE
            if not self._has_paused:
                log.warning("%s are recorded again %d steps after each failure: %r", self._kind, _PAUSE, error)
            self._has_paused = True


@dataclass(slots=True)
class _RecordedStep:
    replay: RecordedPass
    logits: Tensor
    verified: bool = False


class RecordedDecodes:
    """The recorded passes of decodes, by number of sequences and version of the adapters."""

    def __init__(
        self, forward: Forward, recorder: Recorder, inputs: StaticInputs, states: RecurrentStates | None = None
    ) -> None:
        self._forward = forward
        self._states = states
        self._recorder = recorder
        self._inputs = inputs
        self._steps: dict[StepKey, _RecordedStep] = {}

    def run(self, batch: FlatBatch) -> Tensor | None:
        if not batch.all_logits or not self._inputs.fit(batch):
            return None
        self._inputs.copy_from(batch)
        adapters = batch.adapters.version if batch.adapters else None
        key = batch.attention.num_decodes, adapters
        static, step = self._inputs.batch(*key), self._steps.get(key)
        if step and step.verified:
            step.replay()
            return step.logits
        if step is None and adapters is not None:
            self._steps = without_stale(self._steps, adapters)
        restore = self._states.saved(static.state_slots) if self._states else lambda: None
        try:
            if step is None:
                self._steps[key] = step = _RecordedStep(*self._recorder.record(lambda: self._forward(static)))
            else:
                eager = self._forward(static)
                restore()
                step.replay()
                if not torch.equal(eager.nan_to_num(), step.logits.nan_to_num()):
                    raise Unsupported(_OTHER_LOGITS)
                step.verified = True
        except BaseException:
            restore()
            raise
        return step.logits


class RecordedPrefill:
    """The recorded pass of steps with prompts. Steps with soft prompts, adapters or many logits run eagerly, and so do
    encoder-decoders and models that need operators of PyTorch.
    """

    def __init__(self, forward: Forward, recorder: Recorder, max_tokens: int, max_rows: int) -> None:
        """Steps have up to `max_tokens` tokens, of `max_rows` sequences, and give as many logits at the most."""
        self._forward = forward
        self._recorder = recorder
        tokens, rows = max(max_tokens, _MIN_SIZE), max(max_rows, _MIN_SIZE)
        self._largest = tokens, rows, rows
        self._inputs = tuple(torch.zeros(tokens, dtype=torch.int64) for _ in range(3))  # token ids, positions, slots
        self._sequences = torch.zeros(rows, 4, dtype=torch.int64)
        self._logits_indices = torch.zeros(rows, dtype=torch.int64)
        self._pass: tuple[ResizablePass, Tensor] | None = None

    def run(self, batch: FlatBatch) -> Tensor | None:
        sequences, slots = batch.attention.cpu_sequences, batch.attention.slot_mapping
        sizes = len(batch.input_ids), len(sequences), len(batch.logits_indices)
        fits = all(size <= most for size, most in zip(sizes, self._largest, strict=True))
        if not fits or batch.spans or batch.adapters or batch.cross:
            return None
        is_new = self._pass is None
        replay, logits = self._pass = self._pass or self._recorder.record_resizable(self._record, self._largest)
        inputs = batch.input_ids, batch.positions, slots, sequences, batch.logits_indices
        for static, new in zip((*self._inputs, self._sequences, self._logits_indices), inputs, strict=True):
            static[: len(new)].copy_(new)
        replay(sizes)
        logits = logits[: sizes[-1]]
        if is_new and not torch.equal(self._forward(batch).nan_to_num(), logits.nan_to_num()):
            raise Unsupported(_OTHER_LOGITS)
        return logits

    def _record(self, sizes: tuple[int, ...]) -> Tensor:
        tokens, rows, logits = sizes
        none = torch.empty(0, dtype=torch.int64)
        ids, positions, slots = (x[:tokens] for x in self._inputs)
        attention = AttentionMetadata(slots, none[:, None], none, [])
        attention.cpu_sequences = self._sequences[:rows]
        return self._forward(FlatBatch(ids, positions, attention, self._logits_indices[:logits], []))
