"""How many tokens to propose: as many as give the most tokens per second, all sequences of a step together.

A proposed token is one more row of a step. What a step with so many rows takes is measured while serving; it jumps
where another tile of a matrix product begins.
"""

from bisect import bisect, insort
from collections.abc import Sequence

_MIN_SECONDS = 1e-6
_WARM_STEPS = 2  # with a new number of rows: engines record and verify them
_FALLING, _RISING = 0.3, 0.05  # weights of a measurement: disturbed ones are too high
_STEPS_PER_MEASUREMENT, _MAX_STEPS = 64, 4096  # until it is forgotten


class StepCosts:
    """The seconds of a step by its number of rows."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._counts: dict[int, int] = {}  # of steps, warm ones included
        self._seconds: dict[int, float] = {}
        self._measured_at: dict[int, int] = {}
        self._known: list[int] = []  # numbers of rows, sorted

    def add(self, rows: int, seconds: float) -> None:
        self._num_steps += 1
        seconds = max(seconds, _MIN_SECONDS)
        count = self._counts[rows] = self._counts.get(rows, 0) + 1
        if count <= _WARM_STEPS:
            return
        known = self._seconds.get(rows)
        if known is None:
            insort(self._known, rows)
            known = seconds
        self._seconds[rows] = known + (_FALLING if seconds < known else _RISING) * (seconds - known)
        self._measured_at[rows] = self._num_steps
        self._forget()

    def known(self, rows: int) -> bool:
        return rows in self._seconds

    def seconds(self, rows: int) -> float:
        """Measured, or a guess where at least one step has had fewer rows: costs do not fall. Guesses are low, so that
        what may pay is tried.
        """
        if rows in self._seconds:
            return self._seconds[rows]
        at = bisect(self._known, rows)
        below = self._known[at - 1]
        low = self._seconds[below]
        if at == len(self._known):
            return low
        above = self._known[at]
        return low + max(self._seconds[above] - low, 0.0) * (rows - below) / (above - below) / 2

    def _forget(self) -> None:
        """Measurements of few steps soonest: what was slow once may be tried again."""
        for rows in [*self._known]:
            lasts = min(_STEPS_PER_MEASUREMENT * (self._counts[rows] - _WARM_STEPS), _MAX_STEPS)
            if self._num_steps - self._measured_at[rows] > lasts:
                self._known.remove(rows)
                del self._seconds[rows]


class Policy:
    """Decides for a whole step."""

    def __init__(self, max_rows: int) -> None:
        """Steps have at most `max_rows` rows, those without a proposal included."""
        self._max_rows = max_rows
        self._costs = StepCosts()

    def step_succeeded(self, rows: int, seconds: float) -> None:
        """A step that only decodes."""
        self._costs.add(rows, seconds)

    def counts(self, rows: int, survival: Sequence[Sequence[float]]) -> list[int]:
        """How many tokens to propose for each of some of `rows` sequences, from the chances that they are kept."""
        counts = [0] * len(survival)
        if not self._costs.known(rows):
            return counts
        ranked = sorted(((chance, row) for row, own in enumerate(survival) for chance in own), reverse=True)
        tokens, best, best_rate = float(rows), 0, rows / self._costs.seconds(rows)
        for extra, (chance, _) in enumerate(ranked[: max(self._max_rows - rows, 0)], 1):
            tokens += chance
            rate = tokens / self._costs.seconds(rows + extra)
            if rate > best_rate:
                best, best_rate = extra, rate
        for _, row in ranked[:best]:
            counts[row] += 1
        return counts
