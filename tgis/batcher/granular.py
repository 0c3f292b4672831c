"""The largest context that a batch will ever have: rows that end early leave room for others to grow.

All rows advance by one token per step, so the context grows until a row ends, and its peaks are the steps in which
rows end. Times are steps from now; a row is `length` tokens now and has `rest` steps left.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from itertools import accumulate
from math import inf


class PeakEstimator:
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
        self._negative_remaining = [negative for negative, _ in ordered]  # negative rests: rising, for bisections
        lengths = [length for _, length in ordered]
        self._cumulative_lengths = list(accumulate(lengths, max if padded else None))  # longest row, or sum, as of now
        self._context_with_one_more = self._context_at_ends(
            0, 1
        )  # context as of each end, but for the new row's own length
        self._max_length = max(lengths, default=0)
        self._total_length = sum(lengths)
        self._total_remaining = -sum(self._negative_remaining)
        self._rejected: list[tuple[int, float]] = []  # no entry is at least another in both: rests fall

    def fits_worst_case(self, length: int, remaining: int) -> bool:
        """Whether the batch fits with this row, even if every row lasted as long as the last one."""
        if self._padded:
            latest = -self._negative_remaining[0] if self._negative_remaining else 0
            worst = (max(self._max_length, length) + max(latest, remaining)) * (len(self._negative_remaining) + 1)
        else:
            worst = self._total_length + length + self._total_remaining + remaining
        return worst <= self._limit

    def fits(self, length: int, remaining: int) -> bool:
        """Whether the batch with this row stays within the limit for good."""
        if self.fits_worst_case(length, remaining):
            return True
        if self._exceeds_rejected(length, remaining):
            return False
        if self._peak_fits(length, remaining):
            return True
        self._reject(length, remaining)
        return False

    def add(self, length: int, remaining: int) -> None:
        """Add a row. What was refused before stays refused: the context has only grown."""
        at = bisect_left(self._negative_remaining, -remaining)
        before = self._cumulative_lengths[at - 1] if at else 0
        if self._padded:
            self._cumulative_lengths[at:] = [
                max(before, length),
                *[max(width, length) for width in self._cumulative_lengths[at:]],
            ]
        else:
            self._cumulative_lengths[at:] = [
                before + length,
                *[width + length for width in self._cumulative_lengths[at:]],
            ]
        self._negative_remaining.insert(at, -remaining)
        self._context_with_one_more[at:] = self._context_at_ends(at, 1)
        self._max_length = max(self._max_length, length)
        self._total_length += length
        self._total_remaining += remaining

    def peak(self) -> int:
        """The largest context, if no row ends before its time."""
        return max(self._context_at_ends(0, 0), default=0)

    def _context_at_ends(self, start: int, extra_seqs: int) -> list[int]:
        """Context as of the ends from `start` on, with so many rows more (padded: none wider than the batch)."""
        counts = range(start + 1 + extra_seqs, len(self._negative_remaining) + 1 + extra_seqs)
        rows = zip(self._cumulative_lengths[start:], self._negative_remaining[start:], counts, strict=True)
        if self._padded:
            return [(width - end) * count for width, end, count in rows]
        return [width - end * count for width, end, count in rows]

    def _peak_fits(self, length: int, remaining: int) -> bool:
        """Look at the new row's own end, and at the ends before it."""
        limit, ends = self._limit, self._negative_remaining
        living = bisect_right(ends, -remaining)  # rows that live at its end
        first = bisect_left(ends, -remaining, 0, living)  # first row that ends no later
        width = self._cumulative_lengths[living - 1] if living else 0
        if not self._padded:
            own = width + length + (living + 1) * remaining
            return own <= limit and max(self._context_with_one_more[first:], default=0) + length <= limit
        if (max(width, length) + remaining) * (living + 1) > limit:
            return False
        wider = bisect_left(self._cumulative_lengths, length, first)  # from here on the batch is wider than the new row
        if max(self._context_with_one_more[wider:], default=0) > limit:
            return False
        # backwards: of a batch that outgrows the limit, most often many rows are to blame
        return all((length - ends[at]) * (at + 2) <= limit for at in reversed(range(first, wider)))

    def _exceeds_rejected(self, length: int, remaining: int) -> bool:
        at = bisect_right(self._rejected, (length, inf)) - 1
        return at >= 0 and self._rejected[at][1] <= remaining

    def _reject(self, length: int, remaining: int) -> None:
        at = bisect_left(self._rejected, (length, remaining))
        end = at
        while end < len(self._rejected) and self._rejected[end][1] >= remaining:
            end += 1
        self._rejected[at:end] = [(length, remaining)]
