"""Statistics of a step for the metrics: its shape before it is committed, and its effect afterwards."""

from tgis.batcher.batcher import Batcher
from tgis.batcher.capacity import padded_tokens
from tgis.batcher.sequence import Sequence, StepPlan
from tgis.ipc.messages import StepStats


class StepRecord:
    """A record made before the step is committed or any of its sequences dropped: failed ones count."""

    def __init__(self, plan: StepPlan, batcher: Batcher, *, padded: bool, started_at: float) -> None:
        self._plan = plan
        self._batcher = batcher
        self._started_at = started_at
        num_prefill_tokens = plan.num_prefill_tokens
        self._num_prefills = len(num_prefill_tokens)
        self._prefill_tokens = padded_tokens(num_prefill_tokens, padded)
        self._prompt_tokens = sum(
            _count_prompt(seq, count)
            for seq, count in zip(plan.seqs, plan.num_scheduled_tokens, strict=True)
            if seq.num_counted_tokens < seq.prompt_length  # also where the last token of a prompt looks like a decode
        )
        self._started_seqs = [seq for seq in plan.seqs if not seq.num_computed_tokens]
        self._first_scheduled = [seq for seq in batcher.running_seqs if not seq.was_scheduled]
        self._had_running = any(seq.num_computed_tokens for seq in batcher.running_seqs)

    def stats(self, *, computed_at: float, now: float) -> StepStats:
        """The statistics, to be taken once and after the commit; the engine returned at `computed_at`."""
        batcher = self._batcher
        return StepStats(
            prefill=self._plan.has_prefill,
            num_prefills=self._num_prefills,
            num_decodes=len(self._plan.seqs) - self._num_prefills,
            prefill_tokens=self._prefill_tokens,
            duration=now - self._started_at,
            forward_duration=computed_at - self._started_at,
            num_running=batcher.num_running,
            context_tokens=batcher.context_tokens,
            remaining_tokens=sum(seq.num_remaining_tokens for seq in batcher.running_seqs),
            concatenated=self._had_running and not all(seq.finished for seq in self._started_seqs),
            num_requeued=batcher.num_requeued,
            queue_durations=[self._started_at - seq.arrival_time for seq in self._first_scheduled],
            first_scheduled=[seq.id for seq in self._first_scheduled],
            prompt_tokens=self._prompt_tokens,
            counters=batcher.take_counters(),
            token_capacity=batcher.context_limit,
        )


def _count_prompt(seq: Sequence, num_scheduled_tokens: int) -> int:
    """The number of input tokens that the step computes for the first time; after preemption they do not count
    again.
    """
    before = max(seq.num_counted_tokens, seq.request.soft_prompt_length)
    seq.num_counted_tokens = max(before, min(seq.num_computed_tokens + num_scheduled_tokens, seq.prompt_length))
    return seq.num_counted_tokens - before
