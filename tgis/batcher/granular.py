"""The largest context that a batch will ever have: rows that end early leave room for others to grow.

All rows advance by one token per step, so the context grows until a row ends, and its peaks are the steps in which
rows end. Times are steps from now; a row is `length` tokens now and has `rest` steps left.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from itertools import accumulate
from math import inf


class Forecast:
    """The rows of a batch by their ends, and whether one more stays within the limit, in tokens of context.

    Per row, the longest to live first, it knows the batch as of that row's end: the rows up to this one. (When rows
    end together, the last of them counts them all.) A row that dominates one already refused is refused by one
    comparison.
    """

    def __init__(self, rows: Iterable[tuple[int, int]], padded: bool, limit: int) -> None:
        """`rows` are pairs of length and rest."""
        self._padded = padded
        self._limit = limit
        ordered = sorted((-rest, length) for length, rest in rows)
        self._ends = [negative for negative, _ in ordered]  # negative rests: rising, for bisections
        lengths = [length for _, length in ordered]
        self._widths = list(accumulate(lengths, max if padded else None))  # longest row, or sum, as of now
        self._joined = self._totals(0, 1)  # context as of each end, but for the new row's own length
        self._longest = max(lengths, default=0)
        self._lengths = sum(lengths)
        self._rests = -sum(self._ends)
        self._refused: list[tuple[int, float]] = []  # no entry is at least another in both: rests fall

    def fits_at_worst(self, length: int, rest: int) -> bool:
        """Whether the batch fits with this row, even if every row lasted as long as the last one."""
        if self._padded:
            latest = -self._ends[0] if self._ends else 0
            worst = (max(self._longest, length) + max(latest, rest)) * (len(self._ends) + 1)
        else:
            worst = self._lengths + length + self._rests + rest
        return worst <= self._limit

    def fits(self, length: int, rest: int) -> bool:
        """Whether the batch with this row stays within the limit for good."""
        if self.fits_at_worst(length, rest):
            return True
        if self._dominates_a_refused_one(length, rest):
            return False
        if self._stays_within(length, rest):
            return True
        self._refuse(length, rest)
        return False

    def add(self, length: int, rest: int) -> None:
        """Add a row. What was refused before stays refused: the context has only grown."""
        at = bisect_left(self._ends, -rest)
        before = self._widths[at - 1] if at else 0
        if self._padded:
            self._widths[at:] = [max(before, length), *[max(width, length) for width in self._widths[at:]]]
        else:
            self._widths[at:] = [before + length, *[width + length for width in self._widths[at:]]]
        self._ends.insert(at, -rest)
        self._joined[at:] = self._totals(at, 1)
        self._longest = max(self._longest, length)
        self._lengths += length
        self._rests += rest

    def peak(self) -> int:
        """The largest context, if no row ends before its time."""
        return max(self._totals(0, 0), default=0)

    def _totals(self, start: int, more: int) -> list[int]:
        """Context as of the ends from `start` on, with so many rows more (padded: none wider than the batch)."""
        counts = range(start + 1 + more, len(self._ends) + 1 + more)
        rows = zip(self._widths[start:], self._ends[start:], counts, strict=True)
        if self._padded:
            return [(width - end) * count for width, end, count in rows]
        return [width - end * count for width, end, count in rows]

    def _stays_within(self, length: int, rest: int) -> bool:
        """Look at the new row's own end, and at the ends before it."""
        limit, ends = self._limit, self._ends
        living = bisect_right(ends, -rest)  # rows that live at its end
        first = bisect_left(ends, -rest, 0, living)  # first row that ends no later
        width = self._widths[living - 1] if living else 0
        if not self._padded:
            own = width + length + (living + 1) * rest
            return own <= limit and max(self._joined[first:], default=0) + length <= limit
        if (max(width, length) + rest) * (living + 1) > limit:
            return False
        wider = bisect_left(self._widths, length, first)  # from here on the batch is wider than the new row
        if max(self._joined[wider:], default=0) > limit:
            return False
        # backwards: of a batch that outgrows the limit, most often many rows are to blame
        return all((length - ends[at]) * (at + 2) <= limit for at in reversed(range(first, wider)))

    def _dominates_a_refused_one(self, length: int, rest: int) -> bool:
        at = bisect_right(self._refused, (length, inf)) - 1
        return at >= 0 and self._refused[at][1] <= rest

    def _refuse(self, length: int, rest: int) -> None:
        at = bisect_left(self._refused, (length, rest))
        end = at
        while end < len(self._refused) and self._refused[end][1] >= rest:
            end += 1
        self._refused[at:end] = [(length, rest)]
