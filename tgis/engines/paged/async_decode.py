"""Asynchronous decoding: the next decode step is launched before the tokens of the last one are on the host.

A step in flight computes sequences that will need another token unless the one being sampled ends them; that token goes
from one step to the next without leaving the device. The next plan reuses the result, except for sequences that are
gone by then. All steps run in one stream of the device: a sequence that is given a freed block writes to it after the
step in flight has, and reads only what it has written itself.

The mask of a grammar depends on the tokens before it. Of sequences with one, the step in flight computes the logits
only; they are sampled once a plan has the sequence again, with its newest token on the host and its mask ready.

Several ranks launch the same steps: each decides from the same plans and releases. The tokens of the first rank go from
device to device.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tgis.batcher.sequence import Sequence, StepPlan
from tgis.engines.base import StepResult
from tgis.engines.sampling.logprobs import PendingCopy, PromptChunk, PromptLogprobs, Row
from tgis.engines.sampling.sampler import SampledTokens, step_result
from tgis.engines.sharding.collectives import first_of_ranks
from tgis.ipc.request import TokenLogprobs


@dataclass(slots=True)
class InFlightStep:
    """A step that is queued on the device, followed by the copy of its result to the host."""

    sampled: SampledTokens
    prompt_chunks: list[PromptChunk]
    pending: PendingCopy = field(init=False)  # the tables of the sampled tokens, then those of the prompt chunks

    def __post_init__(self) -> None:
        prompt_tables = [chunk.table for chunk in self.prompt_chunks if chunk.table is not None]
        self.pending = PendingCopy([*self.sampled.tables, *prompt_tables])


Launch = Callable[[StepPlan], InFlightStep]
LogitsById = dict[int, Tensor]  # [V] by request id
# Takes the newest tokens, and their indices by request id; returns the logits of sequences with a grammar.
LaunchNext = Callable[[list[Sequence], Tensor, dict[int, int]], tuple[InFlightStep, LogitsById]]
LaunchSampling = Callable[[list[Sequence], Tensor], InFlightStep]  # takes logits [B, V]


@dataclass(slots=True)
class AsyncDecoder:
    """Runs the steps of one engine, from plan to result."""

    launch: Launch
    launch_next: LaunchNext | None  # without it every step is launched when it is planned
    launch_sampling: LaunchSampling
    prompt_logprobs: PromptLogprobs
    block_size: int
    _in_flight: InFlightStep | None = None
    _unsampled: LogitsById = field(default_factory=dict)
    _expected_lengths: dict[int, int] = field(default_factory=dict)  # length of each request when the step is reused

    def step(self, plan: StepPlan) -> StepResult:
        """Reuse the step in flight, launch the rest of the plan and the next step, and only then wait for tokens."""
        if self.launch_next is None:
            return self._collect(plan, [self.launch(plan)])
        reused = [seq for seq in plan.sampled if self._expected_lengths.get(seq.id) == len(seq.tokens)]
        steps = self._reuse(plan, reused)
        rest = plan.without({seq.id for seq in reused}) if reused else plan
        if rest.seqs:
            steps.append(self.launch(rest))
        if seqs := self._continuing(plan):
            # A sequence that was in flight and is not reused is in both steps: the later one counts.
            indices = {seq.id: index for index, seq in enumerate(seq for step in steps for seq in step.sampled.seqs)}
            token_ids = first_of_ranks(torch.cat([step.sampled.token_ids() for step in steps if step.sampled.seqs]))
            self._in_flight, unsampled = self.launch_next(seqs, token_ids, indices)
            self._unsampled |= unsampled
            self._expected_lengths |= {seq.id: len(seq.tokens) + 1 for seq in seqs}
        return self._collect(plan, steps)

    def discard(self) -> None:
        """Do not reuse the step in flight."""
        self._in_flight, self._unsampled, self._expected_lengths = None, {}, {}

    def release(self, ids: Iterable[int]) -> None:
        """Do not reuse the step in flight for the sequences of these requests."""
        for request_id in ids:
            self._unsampled.pop(request_id, None)
            self._expected_lengths.pop(request_id, None)

    def _reuse(self, plan: StepPlan, reused: list[Sequence]) -> list[InFlightStep]:
        """The step in flight, and the sampling of what it has left. The logits of sequences outside the plan, whose
        masks are not ready, are kept for a later one.
        """
        steps = [self._in_flight] if self._in_flight and reused else []
        unsampled, lengths = self._unsampled, self._expected_lengths
        self.discard()
        for request_id in unsampled.keys() - {seq.id for seq in plan.seqs}:
            # A copy, so that the logits of other sequences are freed.
            self._unsampled[request_id] = unsampled[request_id].clone()
            self._expected_lengths[request_id] = lengths[request_id]
        if ready := [seq for seq in reused if seq.id in unsampled]:
            steps.append(self.launch_sampling(ready, torch.stack([unsampled[seq.id] for seq in ready])))
        return steps

    def _continuing(self, plan: StepPlan) -> list[Sequence]:
        """The sequences that need another token unless the next one ends them. Empty if one of them cannot be in the
        next step, because it lacks a block or has not finished its prompt: a second step for it would cost more than is
        gained.
        """
        seqs = [seq for seq in plan.sampled if seq.num_remaining_tokens > 1]
        return seqs if all(map(self._has_free_slot, seqs)) and len(plan.sampled) == len(plan.seqs) else []

    def _has_free_slot(self, seq: Sequence) -> bool:
        position = len(seq.tokens)  # the next position, never in a cached block, which others may share
        assert position >= seq.num_cached_blocks * self.block_size
        return position < len(seq.block_table) * self.block_size

    def _collect(self, plan: StepPlan, steps: list[InFlightStep]) -> StepResult:
        """Wait for the steps; of a sequence that is in two of them the later one counts."""
        rows, problems = dict[int, Row](), dict[int, str]()
        prompt_logprobs = dict[int, list[TokenLogprobs]]()
        for step in steps:
            tables, count = step.pending.wait(), len(step.sampled.tables)
            rows |= step.sampled.rows(tables[:count])
            problems |= step.sampled.problems
            prompt_logprobs |= self.prompt_logprobs.finish(step.prompt_chunks, tables[count:])
        return step_result(plan.sampled, rows, problems, prompt_logprobs)
