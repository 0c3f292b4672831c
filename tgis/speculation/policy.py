"""How many tokens to propose: as many as give the most tokens per second, all sequences of a step together.

A proposed token is one more row of a step. What a step with so many rows takes is measured while serving; it jumps
where another tile of a matrix product begins.
"""

from bisect import bisect, insort
from collections import Counter
from collections.abc import Collection, Sequence

_MIN_SECONDS = 1e-6
_WARM_STEPS = 2  # with a new number of rows: engines record and verify them
_FALLING, _RISING = 0.3, 0.05  # weights of a measurement: disturbed ones are too high
_PACE, _MAX_SLOWDOWN = 0.1, 2.0  # weight of a measurement of what slows all steps down, and how much it may tell
_STEPS_PER_MEASUREMENT, _MAX_STEPS = 512, 16384  # until it is forgotten
_MIN_GAIN = 1.1  # of tokens per second: less is not told from noise
_MIN_UNKNOWN_GAIN = 1.5  # of a number of rows that is not measured: its first steps, which are recorded, take much more
_TILE = 8  # rows: in larger steps their number is a multiple of it, or one that is measured, so that few are recorded


class StepCosts:
    """The seconds of a step by its number of rows, at the pace at which the others were measured."""

    def __init__(self) -> None:
        self._pace = 1.0  # now, as other processes or the clock of the CPU change it
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
            known = seconds / self._pace
        self._pace += _PACE * (min(seconds / known, _MAX_SLOWDOWN) - self._pace)
        seconds /= self._pace
        self._seconds[rows] = known + (_FALLING if seconds < known else _RISING) * (seconds - known)
        self._measured_at[rows] = self._num_steps
        self._forget()

    def known(self, rows: int) -> bool:
        return rows in self._seconds

    def seconds(self, rows: int) -> float:
        """Measured, or a guess where at least one step has had fewer rows: on the line between the steps beside it, or
        beyond the largest step as much for each row as from the smallest on. Costs do not fall.
        """
        if rows in self._seconds:
            return self._seconds[rows]
        at = bisect(self._known, rows)
        below = self._known[at - 1]
        first, last = (below, self._known[at]) if at < len(self._known) else (self._known[0], below)
        slope = (self._seconds[last] - self._seconds[first]) / (last - first) if last > first else 0.0
        return self._seconds[below] + max(slope, 0.0) * (rows - below)

    def larger(self, rows: int) -> list[int]:
        """The numbers of rows above it that were measured."""
        return self._known[bisect(self._known, rows) :]

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
        self._draft_costs = StepCosts()  # by the number of passes of the model that drafts; without one, nothing
        self._resting = 0  # steps in which nothing is looked up

    def step_succeeded(self, rows: int, seconds: float, passes: int = 0) -> None:
        """A step that only decodes, with so many passes of a model that drafts."""
        self._draft_costs.add(0, 0.0)
        if not passes:
            self._costs.add(rows, seconds)
        elif self._draft_costs.known(passes) and not self._costs.known(rows):
            self._costs.add(rows, seconds - self._draft_costs.seconds(passes))
        elif self._costs.larger(0):
            self._draft_costs.add(passes, seconds - self._costs.seconds(rows))

    def may_pay(self, rows: int) -> bool:
        """Whether proposals beside so many sequences would pay if all were kept; not before a step without them is
        measured, and not in the steps after one in which none paid: lookups have their price, too.
        """
        if self._resting or not self._costs.known(rows) or rows >= self._max_rows:
            self._resting = max(self._resting - 1, 0)
            return False
        larger = (rows + 1, *self._costs.larger(rows), self._max_rows)  # between them the gain only rises or only falls
        return any(more > self._least_tokens(rows, more) for more in larger if more <= self._max_rows)

    def best(
        self, rows: int, survival: Sequence[Sequence[float]], drafting: Collection[int] = ()
    ) -> tuple[float, list[int]]:
        """How many times the tokens per second that would pay are expected, and how many tokens to propose for that to
        each of some of `rows` sequences, from the chances that they are kept. At the indices `drafting` a model drafts
        them, one for each of these sequences in a pass.
        """
        counts, passes = [0] * len(survival), 0
        ranked = sorted(((chance, row) for row, own in enumerate(survival) for chance in own), reverse=True)
        tokens, best, best_gain = float(rows), 0, 1.0
        for extra, (chance, row) in enumerate(ranked[: max(self._max_rows - rows, 0)], 1):
            tokens += chance
            counts[row] += 1
            passes = max(passes, counts[row]) if row in drafting else passes
            more = rows + extra
            if more > _TILE and more % _TILE and not self._costs.known(more):
                continue
            gain = tokens / self._least_tokens(rows, more, self._draft_costs.seconds(passes))
            if gain > best_gain:
                best, best_gain = extra, gain
        if best or not drafting:
            self._resting = 0 if best else rows // 2
        chosen = Counter(row for _, row in ranked[:best])
        return best_gain, [chosen[row] for row in range(len(survival))]

    def _least_tokens(self, rows: int, more: int, drafting: float = 0.0) -> float:
        """The tokens from which on a step with more rows, and so many seconds of drafting, pays."""
        gain = _MIN_GAIN if self._costs.known(more) else _MIN_UNKNOWN_GAIN
        return gain * rows * (self._costs.seconds(more) + drafting) / self._costs.seconds(rows)
