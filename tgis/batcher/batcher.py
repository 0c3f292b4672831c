"""Which requests run in the next step, and when each one ends.

The batcher owns every sequence from submission to its end: the waiting room, the running rows, and all stop
reasons that need no text. It never reads a clock: `now` is passed in. A step is `plan` then, once the engine
has computed it, `commit` (or `abandon`).
"""

from collections import deque
from collections.abc import Collection, Iterable

from tgis.batcher.sequence import Plan, Sequence
from tgis.batcher.weights import Limits, padding_share, peak_weight, prefill_tokens
from tgis.messages import Request, StopReason


class Batcher:
    """Continuous batching: rows join and leave at any step, first come first served."""

    def __init__(self, limits: Limits, eos_ids: Collection[int]) -> None:
        self._limits = limits
        self._eos_ids = frozenset(eos_ids)
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._last_was_prefill = False

    @property
    def waiting(self) -> int:
        """Requests that no engine has seen yet."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Rows that the engine holds."""
        return len(self._running)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do until the next message."""
        return not self._waiting and not self._running

    @property
    def remaining(self) -> int:
        """Sum over the rows of the tokens they may still generate."""
        return sum(row.remaining for row in self._running)

    def submit(self, requests: Iterable[Request], now: float) -> None:
        """Queue the inputs of one call, in order."""
        self._waiting.extend(Sequence(request, now) for request in requests)

    def cancel(self, ids: Collection[int]) -> list[Sequence]:
        """Forget requests, wherever they are; the rows that the engine must release. Unknown ids are ended ones."""
        gone = frozenset(ids)
        self._waiting = deque(row for row in self._waiting if row.id not in gone)
        return self._remove(lambda row: row.id in gone, StopReason.CANCELLED)

    def expire(self, now: float) -> list[Sequence]:
        """End the queued requests whose deadline has passed, with TIME_LIMIT and no token."""
        expired = [row for row in self._waiting if _late(row, now)]
        if expired:
            self._waiting = deque(row for row in self._waiting if not _late(row, now))
        for row in expired:
            row.end = StopReason.TIME_LIMIT
        return expired

    def plan(self) -> Plan | None:
        """The next step: a prefill of rows that can join now, else one token for every running row.

        Two prefills never follow each other while rows are running, so that their streams keep moving.
        """
        joining = [] if self._last_was_prefill and self._running else self._admit()
        self._last_was_prefill = bool(joining)
        if joining:
            self._running += joining
            return Plan(joining, prefill=True)
        return Plan(list(self._running), prefill=False) if self._running else None

    def commit(self, plan: Plan, tokens: list[int], now: float) -> list[Sequence]:
        """Append the new token of every row of the plan; the rows that ended, which the engine must release."""
        for row, token in zip(plan.rows, tokens, strict=True):
            row.computed = len(row.tokens)
            row.tokens.append(token)
            row.end = self._end_of(row, now)
        return self._remove(lambda row: row.end is not StopReason.NOT_FINISHED)

    def abandon(self, rows: Collection[Sequence]) -> None:
        """Forget rows whose step failed."""
        gone = {id(row) for row in rows}
        self._remove(lambda row: id(row) in gone, StopReason.ERROR)

    def _end_of(self, row: Sequence, now: float) -> StopReason:
        """The order of front-end stopping, but for stop sequences, which need the text."""
        if _late(row, now):
            return StopReason.TIME_LIMIT
        if row.generated < row.request.sampling.min_new_tokens:
            return StopReason.NOT_FINISHED
        if row.tokens[-1] in self._eos_ids:
            return StopReason.EOS_TOKEN
        if row.remaining <= 0:
            return StopReason.TOKEN_LIMIT if row.request.capped else StopReason.MAX_TOKENS
        return StopReason.NOT_FINISHED

    def _admit(self) -> list[Sequence]:
        """Take from the front of the queue while everything fits; the first that does not waits, and all behind it."""
        joining: list[Sequence] = []
        while self._waiting and self._fits([*joining, self._waiting[0]]):
            joining.append(self._waiting.popleft())
        return joining

    def _fits(self, joining: list[Sequence]) -> bool:
        limits = self._limits
        everyone = self._running + joining
        if len(everyone) == 1:
            return True  # validation has bounded a single request
        return (
            len(everyone) <= limits.max_batch_size
            and peak_weight(everyone, limits.padded) <= limits.weight
            and (len(joining) == 1 or prefill_tokens(joining, limits.padded) <= limits.prefill_tokens)
            and (not limits.padded or padding_share(joining) <= limits.max_padding)
        )

    def _remove(self, leaves, reason: StopReason | None = None) -> list[Sequence]:  # type: ignore[no-untyped-def]
        gone = [row for row in self._running if leaves(row)]
        if gone:
            self._running = [row for row in self._running if not leaves(row)]
        for row in gone:
            row.end = reason or row.end
        return gone


def _late(row: Sequence, now: float) -> bool:
    return row.request.deadline is not None and now > row.request.deadline
