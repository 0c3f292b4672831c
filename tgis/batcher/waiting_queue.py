"""The waiting room: requests in the order in which they will be looked at, with their deadlines."""

import math
from collections.abc import Collection, Iterable, Iterator

from tgis.batcher.sequence import Sequence

OVERTAKING_WINDOW_SECONDS = 1.0
MAX_OVERTAKERS = 64  # that are looked at in one step, so that a long queue of what does not fit costs little time


class WaitingQueue:
    """First come first served; rows of failed steps stand in front of all others.

    Who does not fit may be overtaken, but only by those who were queued within a second of the first such one.
    """

    def __init__(self) -> None:
        self._seqs: list[Sequence] = []
        self._earliest_deadline = math.inf

    def __len__(self) -> int:
        return len(self._seqs)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._seqs)

    def __bool__(self) -> bool:
        return bool(self._seqs)

    @property
    def first(self) -> Sequence:
        """The next in line."""
        return self._seqs[0]

    @property
    def num_requeued(self) -> int:
        """How many have been in a step before."""
        return sum(row.was_scheduled for row in self._seqs)

    def append(self, rows: Iterable[Sequence]) -> None:
        """Queue new rows."""
        for row in rows:
            self._seqs.append(row)
            self._earliest_deadline = min(self._earliest_deadline, _deadline(row))

    def requeue_front(self, rows: list[Sequence]) -> None:
        """Queue rows that have been in a step in front of all others, in the order given."""
        self._seqs[:0] = rows
        self._earliest_deadline = min([self._earliest_deadline, *map(_deadline, rows)])

    def requeue_in_order(self, row: Sequence) -> None:
        """Queue a row that had to make room behind those that are older: it may have overtaken them."""
        place = next(
            (place for place, other in enumerate(self._seqs) if other.arrival_order > row.arrival_order),
            len(self._seqs),
        )
        self._seqs.insert(place, row)
        self._earliest_deadline = min(self._earliest_deadline, _deadline(row))

    def pop(self, rows: Collection[Sequence]) -> None:
        """Take out rows that join a step."""
        gone = {id(row) for row in rows}
        self._seqs = [row for row in self._seqs if id(row) not in gone]

    def remove_ids(self, ids: Collection[int]) -> list[Sequence]:
        """Take out requests; those that were here."""
        gone = [row for row in self._seqs if row.id in ids]
        if gone:
            self._seqs = [row for row in self._seqs if row.id not in ids]
        return gone

    def expire(self, now: float) -> list[Sequence]:
        """Take out the rows whose deadline has passed."""
        if now <= self._earliest_deadline:
            return []
        late = [row for row in self._seqs if _deadline(row) < now]
        self._seqs = [row for row in self._seqs if _deadline(row) >= now]
        self._earliest_deadline = min(map(_deadline, self._seqs), default=math.inf)
        return late


def _deadline(row: Sequence) -> float:
    return math.inf if row.request.deadline is None else row.request.deadline
