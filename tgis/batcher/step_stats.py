"""What a step was, for the metrics: its shape is noted before its rows change, its effect after the commit."""

from tgis.batcher.batcher import Batcher
from tgis.batcher.memory_model import padded_tokens
from tgis.batcher.sequence import StepPlan
from tgis.ipc.messages import StepStats
from tgis.ipc.request import StopReason


class StepRecorder:
    """One step, from plan to commit; all rows of the plan count, those included that failed in it."""

    def __init__(self, plan: StepPlan, batcher: Batcher, *, padded: bool, started_at: float) -> None:
        """To be made before anything of the step is committed or abandoned."""
        self._plan = plan
        self._batcher = batcher
        self._started_at = started_at
        self._padded = padded
        self._num_prefill_tokens = plan.num_prefill_tokens
        self._started_seqs = [row for row in plan.seqs if not row.num_computed_tokens] if plan.has_prefill else []
        self._first_scheduled = (
            [row for row in batcher.running_seqs if not row.was_scheduled] if plan.has_prefill else []
        )
        self._had_running = any(row.num_computed_tokens for row in batcher.running_seqs)

    def stats(self, computed_at: float, now: float) -> StepStats:
        """To be asked for once, after the commit; `computed` is when the engine had done its part."""
        batcher = self._batcher
        return StepStats(
            prefill=self._plan.has_prefill,
            num_prefills=len(self._num_prefill_tokens),
            num_decodes=len(self._plan.seqs) - len(self._num_prefill_tokens),
            prefill_tokens=padded_tokens(self._num_prefill_tokens, self._padded),
            duration=now - self._started_at,
            forward_duration=computed_at - self._started_at,
            num_running=batcher.num_running,
            context_tokens=batcher.context_tokens,
            remaining_tokens=sum(row.num_remaining_tokens for row in batcher.running_seqs),
            concatenated=self._had_running
            and any(row.stop_reason is StopReason.NOT_FINISHED for row in self._started_seqs),
            num_requeued=batcher.num_requeued,
            queue_durations=[self._started_at - row.arrival_time for row in self._first_scheduled],
            first_scheduled=[row.id for row in self._first_scheduled],
            admissions=batcher.take_counters(),
            token_capacity=batcher.context_limit,
        )
