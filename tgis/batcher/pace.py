"""When a prefill may interrupt the running rows, for engines that do one thing at a time."""

from tgis.batcher.sequence import Plan


class Pace:
    """Requests join as soon as there is room, but running rows keep a third of the time.

    After a prefill they get steps for half as long as it took, one at least and at the most as many as configured.
    TGIS also waits for several requests to prefill together. That costs more in empty slots than it saves where a
    prefill takes as long as its rows do one by one: in `tgis simulate`, 64 rows on two cores, 2 to 4 % of the tokens
    per second and many times the time to the first token.
    """

    def __init__(self, max_waiting_tokens: int) -> None:
        self._most_steps = max(max_waiting_tokens, 1)
        self._steps = 0  # since the last prefill
        self._resume = 0.0  # when the running rows have had their share
        self._begun = 0.0

    def due(self, running: int, now: float) -> bool:
        """Whether requests that could join may interrupt the running rows."""
        rested = self._steps and now >= self._resume
        return not running or bool(rested) or self._steps >= self._most_steps

    def started(self, now: float) -> None:
        """A step begins."""
        self._begun = now

    def failed(self, plan: Plan) -> None:
        """A step has failed: that took time too."""
        if plan.prefill:
            self._steps = 0

    def ended(self, plan: Plan, now: float) -> None:
        """A step has succeeded."""
        if plan.prefill:
            self._steps = 0
            self._resume = now + (now - self._begun) / 2
        else:
            self._steps += 1
