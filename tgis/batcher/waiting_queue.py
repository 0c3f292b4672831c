"""Requests that wait for a place in the batch, in the order in which they will be considered."""

import math
from collections.abc import Collection, Iterable, Iterator

from tgis.batcher.sequence import Sequence

OVERTAKING_WINDOW_SECONDS = 1.0
MAX_OVERTAKERS = 64  # considered in one step: a long queue of what does not fit must cost little time


class WaitingQueue:
    """First come, first served, behind the sequences of failed steps.

    A request that does not fit may be overtaken, but only by those that arrived within a second of it.
    """

    def __init__(self) -> None:
        self._seqs: list[Sequence] = []
        self._earliest_deadline = math.inf

    def __len__(self) -> int:
        return len(self._seqs)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._seqs)

    @property
    def first(self) -> Sequence:
        return self._seqs[0]

    @property
    def num_requeued(self) -> int:
        """How many have been in a step before."""
        return sum(seq.was_scheduled for seq in self._seqs)

    def append(self, seqs: Iterable[Sequence]) -> None:
        self._insert(len(self._seqs), seqs)

    def requeue_front(self, seqs: Iterable[Sequence]) -> None:
        """Put sequences of a failed step in front of all others, in the order given."""
        self._insert(0, seqs)

    def requeue_in_order(self, seq: Sequence) -> None:
        """Put a preempted sequence behind those that are older: it may have overtaken them."""
        later = (at for at, other in enumerate(self._seqs) if other.arrival_order > seq.arrival_order)
        self._insert(next(later, len(self._seqs)), [seq])

    def remove(self, ids: Collection[int]) -> list[Sequence]:
        """Take out requests; return those that were here."""
        removed = [seq for seq in self._seqs if seq.id in ids]
        if removed:
            self._seqs = [seq for seq in self._seqs if seq.id not in ids]
        return removed

    def expire(self, now: float, next_answer: float, num_steps: int) -> list[Sequence]:
        """Take out what is past its deadline, but not what has no token yet and has not waited through a step.

        `num_steps`: that have succeeded by now.
        """
        if next_answer <= self._earliest_deadline:
            return []
        late = [seq for seq in self._seqs if seq.expired(now, next_answer)]
        expired = self.remove({seq.id for seq in late if seq.num_generated_tokens or seq.queued_at_step < num_steps})
        self._earliest_deadline = min(map(_deadline, self._seqs), default=math.inf)
        return expired

    def _insert(self, at: int, seqs: Iterable[Sequence]) -> None:
        new = list(seqs)
        self._seqs[at:at] = new
        self._earliest_deadline = min([self._earliest_deadline, *map(_deadline, new)])


def _deadline(seq: Sequence) -> float:
    deadlines = (seq.request.deadline, seq.request.answer_deadline)
    return min((deadline for deadline in deadlines if deadline is not None), default=math.inf)
