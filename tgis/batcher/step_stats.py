"""What a step was, for the metrics: its shape is noted before its rows change, its effect after the commit."""

from tgis.batcher.batcher import Batcher
from tgis.batcher.memory_model import area
from tgis.batcher.sequence import Plan
from tgis.ipc.messages import StepStats, StopReason


class Report:
    """One step, from plan to commit; all rows of the plan count, those included that failed in it."""

    def __init__(self, plan: Plan, batcher: Batcher, *, padded: bool, started: float) -> None:
        """To be made before anything of the step is committed or abandoned."""
        self._plan = plan
        self._batcher = batcher
        self._started = started
        self._padded = padded
        self._prompt_counts = plan.prompt_counts
        self._came = [row for row in plan.rows if not row.computed] if plan.prefill else []
        self._joined = [row for row in batcher.rows if not row.joined] if plan.prefill else []
        self._beside_others = any(row.computed for row in batcher.rows)

    def stats(self, computed: float, now: float) -> StepStats:
        """To be asked for once, after the commit; `computed` is when the engine had done its part."""
        batcher = self._batcher
        return StepStats(
            prefill=self._plan.prefill,
            prefilled=len(self._prompt_counts),
            decoded=len(self._plan.rows) - len(self._prompt_counts),
            prompt_tokens=area(self._prompt_counts, self._padded),
            duration=now - self._started,
            forward=computed - self._started,
            running=batcher.running,
            context=batcher.context,
            remaining=sum(row.remaining for row in batcher.rows),
            concatenated=self._beside_others and any(row.end is StopReason.NOT_FINISHED for row in self._came),
            returned=batcher.returned,
            queued_for=[self._started - row.queued_at for row in self._joined],
            joined=[row.id for row in self._joined],
            admissions=batcher.take_admissions(),
            weight_limit=batcher.context_limit,
        )
