"""The largest context that a batch will ever have: rows that end early leave room for others to grow.

All rows advance by one token per step, so the context grows until a row ends, and its peaks are the steps in which
rows end. Times are steps from now; a row is `length` tokens now and has `rest` steps left.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable
from itertools import accumulate
from math import inf


class Forecast:
    """The rows of a batch by their ends, and whether one more stays within the limit, in tokens of context.

    A question costs one bisection (on padded batches also a walk over the rows that are shorter than the new one),
    and a row that dominates one already refused is refused by one comparison: a queue of a thousand costs little.
    """

    def __init__(self, rows: Iterable[tuple[int, int]], padded: bool, limit: int) -> None:
        """`rows` are pairs of length and rest."""
        self._padded = padded
        self._limit = limit
        self._rows = sorted((-rest, length) for length, rest in rows)  # the longest to live first
        self._longest = max((length for _, length in self._rows), default=0)
        self._latest = -self._rows[0][0] if self._rows else 0
        self._lengths = sum(length for _, length in self._rows)
        self._rests = -sum(negative for negative, _ in self._rows)
        self._refused: list[tuple[int, float]] = []  # no entry is at least another in both: rests fall
        self._stale = True

    def fits_at_worst(self, length: int, rest: int) -> bool:
        """Whether the batch fits with this row, even if every row lasted as long as the last one."""
        if self._padded:
            worst = (max(self._longest, length) + max(self._latest, rest)) * (len(self._rows) + 1)
        else:
            worst = self._lengths + length + self._rests + rest
        return worst <= self._limit

    def fits(self, length: int, rest: int) -> bool:
        """Whether the batch with this row stays within the limit for good."""
        if self.fits_at_worst(length, rest):
            return True
        if self._dominates_a_refused_one(length, rest):
            return False
        if self._stale:
            self._index()
        if self._peak_with(length, rest):
            return True
        self._refuse(length, rest)
        return False

    def add(self, length: int, rest: int) -> None:
        """Add a row. What was refused before stays refused: the context has only grown."""
        insort(self._rows, (-rest, length))
        self._longest, self._latest = max(self._longest, length), max(self._latest, rest)
        self._lengths += length
        self._rests += rest
        self._stale = True

    def peak(self) -> int:
        """The largest context, if no row ends before its time."""
        self._index()
        return max(self._totals, default=0)

    def _index(self) -> None:
        """Lay out what a question needs: per row, as of its end, the rows that still live."""
        self._ends = [negative for negative, _ in self._rows]
        lengths = [length for _, length in self._rows]
        numbers = range(1, len(lengths) + 1)
        # When rows end together the last of them in this order counts them all.
        if self._padded:
            self._widths = list(accumulate(lengths, max))
            self._totals = [(w - e) * n for w, e, n in zip(self._widths, self._ends, numbers, strict=True)]
            joined = [(w - e) * (n + 1) for w, e, n in zip(self._widths, self._ends, numbers, strict=True)]
        else:
            self._widths = list(accumulate(lengths))
            self._totals = [w - e * n for w, e, n in zip(self._widths, self._ends, numbers, strict=True)]
            joined = [w - e * (n + 1) for w, e, n in zip(self._widths, self._ends, numbers, strict=True)]
        self._joined = list(accumulate(reversed(joined), max))[::-1]  # the worst from here on, with one row more
        self._joined.append(0)
        self._stale = False

    def _peak_with(self, length: int, rest: int) -> bool:
        """Look at the new row's own end, and at the ends before it."""
        living = bisect_right(self._ends, -rest)  # rows that live at its end
        first = bisect_left(self._ends, -rest)  # first row that ends no later
        if not self._padded:
            width = self._widths[living - 1] if living else 0
            own = width + length + (living + 1) * rest
            worst = self._joined[first] + length if first < len(self._ends) else 0
            return own <= self._limit and worst <= self._limit
        width = max(self._widths[living - 1] if living else 0, length)
        wider = max(bisect_left(self._widths, length), first)  # from here on the batch is wider than the new row
        return (
            (width + rest) * (living + 1) <= self._limit
            and self._joined[wider] <= self._limit
            and all((length - self._ends[i]) * (i + 2) <= self._limit for i in range(first, wider))
        )

    def _dominates_a_refused_one(self, length: int, rest: int) -> bool:
        at = bisect_right(self._refused, (length, inf)) - 1
        return at >= 0 and self._refused[at][1] <= rest

    def _refuse(self, length: int, rest: int) -> None:
        at = bisect_left(self._refused, (length, rest))
        end = at
        while end < len(self._refused) and self._refused[end][1] >= rest:
            end += 1
        self._refused[at:end] = [(length, rest)]
