"""The waiting room: requests in the order in which they will be looked at, with their deadlines."""

import math
from collections.abc import Collection, Iterable, Iterator

from tgis.batcher.sequence import Sequence

OVERTAKING_SECONDS = 1.0
OVERTAKERS = 64  # that are looked at in one step, so that a long queue of what does not fit costs little time


class WaitingRoom:
    """First come first served; rows of failed steps stand in front of all others.

    Who does not fit may be overtaken, but only by those who were queued within a second of the first such one.
    """

    def __init__(self) -> None:
        self._rows: list[Sequence] = []
        self._first_deadline = math.inf

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._rows)

    def __bool__(self) -> bool:
        return bool(self._rows)

    @property
    def first(self) -> Sequence:
        """The next in line."""
        return self._rows[0]

    @property
    def returned(self) -> int:
        """How many have been in a step before."""
        return sum(row.joined for row in self._rows)

    def append(self, rows: Iterable[Sequence]) -> None:
        """Queue new rows."""
        for row in rows:
            self._rows.append(row)
            self._first_deadline = min(self._first_deadline, _deadline(row))

    def put_back(self, rows: list[Sequence]) -> None:
        """Queue rows that have been in a step in front of all others, in the order given."""
        self._rows[:0] = rows
        self._first_deadline = min([self._first_deadline, *map(_deadline, rows)])

    def insert(self, row: Sequence) -> None:
        """Queue a row that had to make room behind those that are older: it may have overtaken them."""
        place = next((place for place, other in enumerate(self._rows) if other.age > row.age), len(self._rows))
        self._rows.insert(place, row)
        self._first_deadline = min(self._first_deadline, _deadline(row))

    def take(self, rows: Collection[Sequence]) -> None:
        """Take out rows that join a step."""
        gone = {id(row) for row in rows}
        self._rows = [row for row in self._rows if id(row) not in gone]

    def remove(self, ids: Collection[int]) -> list[Sequence]:
        """Take out requests; those that were here."""
        gone = [row for row in self._rows if row.id in ids]
        if gone:
            self._rows = [row for row in self._rows if row.id not in ids]
        return gone

    def expire(self, now: float) -> list[Sequence]:
        """Take out the rows whose deadline has passed."""
        if now <= self._first_deadline:
            return []
        late = [row for row in self._rows if _deadline(row) < now]
        self._rows = [row for row in self._rows if _deadline(row) >= now]
        self._first_deadline = min(map(_deadline, self._rows), default=math.inf)
        return late


def _deadline(row: Sequence) -> float:
    return math.inf if row.request.deadline is None else row.request.deadline
