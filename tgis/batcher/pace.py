"""When a prefill may interrupt the running rows, for engines that do one thing at a time."""

from tgis.batcher.sequence import Plan


class Pace:
    """Two prefills never follow each other while rows are running, so that their streams keep moving."""

    def __init__(self, max_waiting_tokens: int) -> None:
        self._max_waiting = max_waiting_tokens
        self._last_was_prefill = False
        self._started = 0.0

    def due(self, running: int, joinable: int, now: float) -> bool:
        """Whether the requests that wait, and of which so many could join, are reason enough."""
        return not running or not self._last_was_prefill

    def started(self, now: float) -> None:
        """A step begins."""
        self._started = now

    def ended(self, plan: Plan, now: float) -> None:
        """A step has succeeded."""
        self._last_was_prefill = plan.prefill
