"""The number of proposed tokens that gives the most tokens per second over all sequences of a step.

A proposed token is one more row of a step. The cost of a step by its number of rows is measured while serving; it jumps
where another tile of a matrix product begins.
"""

from bisect import bisect, insort
from collections import Counter
from collections.abc import Collection, Sequence

_MIN_SECONDS = 1e-6
_WARM_STEPS = 2  # steps with a new number of rows: engines record and verify these
_FALLING, _RISING = 0.3, 0.05  # weights of a lower and of a higher measurement: disturbances only add time
_PACE, _MAX_SLOWDOWN = 0.1, 2.0  # weight of a measurement in the pace of the machine, and its upper bound
_STEPS_PER_MEASUREMENT, _MAX_STEPS = 512, 16384  # lifetime
_MIN_GAIN = 1.1  # least ratio of tokens per second: less is noise
_MIN_UNKNOWN_GAIN = 1.5  # least ratio for an unmeasured number of rows: recording its first steps is slow
_TILE = 8  # rows; larger steps have a multiple of it, or a measured number, so that few sizes are recorded


class StepCosts:
    """The seconds of a step by its number of rows, relative to the current pace of the machine."""

    def __init__(self) -> None:
        self._pace = 1.0  # changes with other processes and the CPU's clock
        self._num_steps = 0
        self._counts: dict[int, int] = {}  # steps, warm ones included
        self._seconds: dict[int, float] = {}
        self._measured_at: dict[int, int] = {}
        self._known: list[int] = []  # sorted numbers of rows

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
        """The measured seconds; else interpolated between the nearest measured numbers of rows, or extrapolated beyond
        the largest with the average slope. At least one smaller number is measured. Costs do not fall.
        """
        if rows in self._seconds:
            return self._seconds[rows]
        at = bisect(self._known, rows)
        below = self._known[at - 1]
        first, last = (below, self._known[at]) if at < len(self._known) else (self._known[0], below)
        slope = (self._seconds[last] - self._seconds[first]) / (last - first) if last > first else 0.0
        return self._seconds[below] + max(slope, 0.0) * (rows - below)

    def larger(self, rows: int) -> list[int]:
        """The measured numbers of rows above `rows`."""
        return self._known[bisect(self._known, rows) :]

    def _forget(self) -> None:
        """Forget old measurements, those of few steps first: a size that was slow once may be tried again."""
        for rows in [*self._known]:
            lasts = min(_STEPS_PER_MEASUREMENT * (self._counts[rows] - _WARM_STEPS), _MAX_STEPS)
            if self._num_steps - self._measured_at[rows] > lasts:
                self._known.remove(rows)
                del self._seconds[rows]


class Policy:
    """Decides for all sequences of a step."""

    def __init__(self, max_rows: int) -> None:
        """Steps have at most `max_rows` rows, including those of sequences without proposals."""
        self._max_rows = max_rows
        self._costs = StepCosts()
        self._draft_costs = StepCosts()  # costs by the number of passes of the draft model
        self._resting = 0  # steps without lookups

    def step_succeeded(self, rows: int, seconds: float, passes: int = 0) -> None:
        """Learn from a step that only decodes, with `passes` of a draft model."""
        self._draft_costs.add(0, 0.0)
        if not passes:
            self._costs.add(rows, seconds)
        elif self._draft_costs.known(passes) and not self._costs.known(rows):
            self._costs.add(rows, seconds - self._draft_costs.seconds(passes))
        elif self._costs.larger(0):
            self._draft_costs.add(passes, seconds - self._costs.seconds(rows))

    def may_pay(self, rows: int) -> bool:
        """Whether proposals would pay in a step of `rows` sequences if all were accepted. False before a step without
        proposals is measured, and for some steps after one in which none paid, since lookups take time.
        """
        if self._resting or not self._costs.known(rows) or rows >= self._max_rows:
            self._resting = max(self._resting - 1, 0)
            return False
        larger = (rows + 1, *self._costs.larger(rows), self._max_rows)  # the gain is monotonic between them
        return any(more > self._least_tokens(rows, more) for more in larger if more <= self._max_rows)

    def best(
        self, rows: int, cumulative: Sequence[Sequence[float]], drafting: Collection[int] = ()
    ) -> tuple[float, list[int]]:
        """The best expected gain, as a multiple of the tokens per second that would pay, and the number of tokens to
        propose for it to each of some of `rows` sequences.

        `cumulative` are their acceptance probabilities, sequence by sequence. At the indices `drafting` the draft model
        makes the tokens, one for each of these sequences in a pass.
        """
        counts, passes = [0] * len(cumulative), 0
        ranked = sorted(((p, row) for row, of_row in enumerate(cumulative) for p in of_row), reverse=True)
        tokens, best, best_gain = float(rows), 0, 1.0
        for extra, (probability, row) in enumerate(ranked[: max(self._max_rows - rows, 0)], 1):
            tokens += probability
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
        return best_gain, [chosen[row] for row in range(len(cumulative))]

    def _least_tokens(self, rows: int, more: int, draft_seconds: float = 0.0) -> float:
        """The fewest tokens for which a step with `more` rows pays."""
        gain = _MIN_GAIN if self._costs.known(more) else _MIN_UNKNOWN_GAIN
        return gain * rows * (self._costs.seconds(more) + draft_seconds) / self._costs.seconds(rows)
