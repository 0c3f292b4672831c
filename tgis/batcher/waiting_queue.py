"""The queue of requests that wait for a place in the batch, in the order in which they are considered."""

import bisect
import math
from collections.abc import Collection, Iterable, Iterator

from tgis.batcher.sequence import Sequence

OVERTAKING_WINDOW_SECONDS = 1.0
MAX_OVERTAKERS = 64  # considered in one step: a long queue of what does not fit must cost little time
# Distance of a new client from the head of the queue: without it, ever new ones would starve others.
TOKENS_PER_ROUND = 128


class WaitingQueue:
    """Fair between clients, first come, first served within each, behind the sequences of failed steps.

    Start-time fair queueing: each request has a start tag, in tokens. The first of a client is one round behind the
    head of the queue, and each that follows is behind the one before it by the tokens that this one may have in the
    end. Nothing is kept of clients without requests. A request that does not fit may be overtaken, but only by those
    that arrived within a second of it.
    """

    def __init__(self) -> None:
        self._seqs: list[Sequence] = []  # sorted by `_place`
        self._virtual_time = 0  # the start tag of the head of the queue at the latest arrival; never decreases
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
        """How many waiting sequences have been in a step before."""
        return sum(seq.was_scheduled for seq in self)

    def append(self, seqs: list[Sequence], running: Iterable[Sequence]) -> None:
        """Queue the inputs of one call, in order and behind the running sequences of their client."""
        if not seqs:
            return
        self._virtual_time = max([self._virtual_time, *(seq.start_tag for seq in self._seqs[:1] or running)])
        start_tag = self._next_start_tag(seqs[0].request.client, running)
        for seq in seqs:
            seq.start_tag = start_tag
            start_tag += seq.max_length
        self.requeue(seqs)

    def requeue(self, seqs: list[Sequence]) -> None:
        """Put sequences in their places by turn, behind those that they may have overtaken."""
        for seq in seqs:
            bisect.insort(self._seqs, seq, key=_place)
        self._earliest_deadline = min([self._earliest_deadline, *map(_deadline, seqs)])

    def remove(self, ids: Collection[int]) -> list[Sequence]:
        """Take out requests; returns the ones that were in the queue."""
        removed = [seq for seq in self if seq.id in ids]
        if removed:
            self._seqs = [seq for seq in self._seqs if seq.id not in ids]
        return removed

    def expire(self, now: float, next_answer: float, num_steps: int) -> list[Sequence]:
        """Take out sequences that are past their deadline, except those with no token that have not waited through a
        step.

        `num_steps` is the number of steps that have succeeded.
        """
        if next_answer <= self._earliest_deadline:
            return []
        late = [seq for seq in self if seq.expired(now, next_answer)]
        expired = self.remove({seq.id for seq in late if seq.num_generated_tokens or seq.queued_at_step < num_steps})
        self._earliest_deadline = min(map(_deadline, self), default=math.inf)
        return expired

    def _next_start_tag(self, client: bytes, admitted: Iterable[Sequence]) -> int:
        """The start tag behind the last waiting request of a client, and not before those that it has in the batch."""
        start_tags = [seq.start_tag for seq in admitted if seq.request.client == client]
        if last := next((seq for seq in reversed(self._seqs) if seq.request.client == client), None):
            start_tags.append(last.start_tag + last.max_length)
        return max([self._virtual_time + TOKENS_PER_ROUND, *start_tags])


def _place(seq: Sequence) -> tuple[bool, tuple[int, float, int]]:
    """The sort key of the queue: those of failed steps come first."""
    return not seq.retry_group, seq.turn


def _deadline(seq: Sequence) -> float:
    deadlines = (seq.request.deadline, seq.request.answer_deadline)
    return min((deadline for deadline in deadlines if deadline is not None), default=math.inf)
