"""When a prefill may interrupt the running rows, for engines that do one thing at a time."""

from tgis.batcher.sequence import StepPlan


class PrefillInterleaving:
    """Requests join as soon as there is room, but running rows keep a third of the time.

    After a prefill they get steps for half as long as it took, one at least and at the most as many as configured.
    TGIS also waits for several requests to prefill together. That costs more in empty slots than it saves where a
    prefill takes as long as its rows do one by one: in `tgis simulate`, 64 rows on two cores, 2 to 4 % of the tokens
    per second and many times the time to the first token.
    """

    def __init__(self, max_waiting_tokens: int) -> None:
        self._max_decode_steps = max(max_waiting_tokens, 1)
        self._decode_steps = 0  # since the last prefill
        self._next_prefill_at = 0.0  # when the running rows have had their share
        self._step_started_at = 0.0

    def may_prefill(self, num_running: int, now: float) -> bool:
        """Whether requests that could join may interrupt the running rows."""
        rested = self._decode_steps and now >= self._next_prefill_at
        return not num_running or bool(rested) or self._decode_steps >= self._max_decode_steps

    def step_started(self, now: float) -> None:
        """A step begins."""
        self._step_started_at = now

    def step_failed(self, plan: StepPlan) -> None:
        """A step has failed: that took time too."""
        if plan.has_prefill:
            self._decode_steps = 0

    def step_succeeded(self, plan: StepPlan, now: float) -> None:
        """A step has succeeded."""
        if plan.has_prefill:
            self._decode_steps = 0
            self._next_prefill_at = now + (now - self._step_started_at) / 2
        else:
            self._decode_steps += 1
