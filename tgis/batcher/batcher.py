"""Which requests run in the next step, and when each one ends.

The batcher owns every sequence from submission to its end: the waiting room, the running rows, and all stop
reasons that need no text. It never reads a clock: `now` is passed in. A step is `plan`, then `commit` once the
engine has computed it, or `retreat` if the engine could not.
"""

from collections.abc import Callable, Collection, Iterable
from itertools import islice

from tgis.batcher.admission import BlockDoor, Door, WholeDoor, choose, context_now, context_peak
from tgis.batcher.allowance import Allowance
from tgis.batcher.block_manager import Pager
from tgis.batcher.fault_isolation import Trials
from tgis.batcher.memory_model import Limits
from tgis.batcher.pace import Pace
from tgis.batcher.prefill_budget import ChunkPace, share_out
from tgis.batcher.sequence import Plan, Sequence
from tgis.batcher.waiting_queue import WaitingRoom
from tgis.ipc.messages import Admissions, Request, StopReason
from tgis.ipc.snapshot import Refusal, RowState, Snapshot


class Batcher:
    """Continuous batching: rows join and leave at any step."""

    def __init__(self, limits: Limits, eos_ids: Collection[int]) -> None:
        self._limits = limits
        self._eos_ids = frozenset(eos_ids)
        self._waiting = WaitingRoom()
        self._running: list[Sequence] = []
        self._allowance = Allowance(limits)
        self._pace = Pace(limits.max_waiting_tokens)
        self._chunk_pace = ChunkPace(limits.prefill_tokens, limits.stretch)
        self._pager = Pager.of(limits) if limits.block_size else None
        self._trials = Trials()
        self._admissions = Admissions()
        self._refusal: Refusal | None = None  # of the first that waits
        self._last_refusal: tuple[Refusal, float] | None = None  # and when

    @property
    def waiting(self) -> int:
        """Requests that are in no step at present."""
        return len(self._waiting)

    @property
    def returned(self) -> int:
        """Requests among them that have been in a step before."""
        return self._waiting.returned

    @property
    def running(self) -> int:
        """Rows that the engine holds."""
        return len(self._running)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do until the next message."""
        return not self._waiting and not self._running

    @property
    def rows(self) -> list[Sequence]:
        """The running rows, as they are now; not to be changed."""
        return self._running

    @property
    def context(self) -> int:
        """Tokens of context of the running rows, padding included."""
        return context_now(self._running, self._limits.padded)

    @property
    def context_limit(self) -> int:
        """Tokens of context that a batch may have at present."""
        return self._allowance.context

    def submit(self, requests: Iterable[Request], at: float) -> list[Sequence]:
        """Queue the inputs of one call, in order; `at` is when they came, no earlier than those before them."""
        rows = [Sequence(request, at) for request in requests]
        self._waiting.append(rows)
        return rows

    def cancel(self, ids: Collection[int]) -> list[Sequence]:
        """Forget requests, wherever they are; the rows that the engine must release. Unknown ids are ended ones."""
        gone = frozenset(ids)
        for row in self._waiting.remove(gone):
            row.end = StopReason.CANCELLED
            self._refusal = None  # it may have been this one's
        cancelled = self._remove(lambda row: row.id in gone)
        for row in cancelled:
            row.end = StopReason.CANCELLED
        return cancelled

    def expire(self, now: float) -> list[Sequence]:
        """End what waits, or is in the middle of its prompt, and is late: TIME_LIMIT and no further token.

        The engine must release the rows; those it never had are among them.
        """
        expired = self._waiting.expire(now)
        if expired:
            self._refusal = None  # it may have been one of theirs
        if self._pager:
            expired += self._remove(lambda row: not row.decoding and row.late(now))
        for row in expired:
            row.end = StopReason.TIME_LIMIT
        return expired

    def plan(self, now: float) -> Plan | None:
        """The next step; None if nothing can run. Its rows stay as they are until `commit` or `retreat`."""
        plan = self._plan_chunked(self._pager) if self._pager else self._plan_whole(now)
        self._pace.started(now)
        self._chunk_pace.started(plan, now)
        if self._refusal is not None:
            self._last_refusal = self._refusal, now
        return plan

    def commit(self, plan: Plan, tokens: list[int], now: float) -> list[Sequence]:
        """Append a new token to each sampled row of the plan; the rows that ended, which the engine must release."""
        for row, count in zip(plan.rows, plan.counts, strict=True):
            row.computed += count
            if self._pager:
                self._pager.label(row)
        for row, token in zip(plan.sampled, tokens, strict=True):
            row.tokens.append(token)
            row.end = self._end_of(row, now)
            row.failures = row.trial = 0
        for row in self._running:
            row.joined = True
        self._allowance.succeeded()
        self._pace.ended(plan, now)
        self._chunk_pace.ended(now)
        return self._remove(lambda row: row.end is not StopReason.NOT_FINISHED)

    def abandon(self, rows: Collection[Sequence]) -> None:
        """Forget rows that got an error instead of a token."""
        gone = {id(row) for row in rows}
        for row in self._remove(lambda row: id(row) in gone):
            row.end = StopReason.ERROR

    def retreat(self, plan: Plan, *, out_of_memory: bool) -> list[Sequence]:
        """A step failed and the engine has released its rows: queue them in front, to be computed anew.

        Returns the rows that are refused instead, because they have failed alone.
        """
        self._pace.failed(plan)
        alone = len(plan.rows) == 1
        if out_of_memory:
            self._shrink(plan)
            refused = plan.rows if alone and len(self._running) == 1 else []
            groups = [plan.rows]
        else:
            refused, groups = self._trials.divide(plan.rows)
        for row in plan.rows:
            row.computed = 0
        self.abandon(refused)
        again = [row for group in groups for row in group if row.end is StopReason.NOT_FINISHED]
        back = {id(row) for row in again}
        self._remove(lambda row: id(row) in back)
        self._waiting.put_back(again)
        self._refusal = None  # it was of those behind them
        return refused

    def take_admissions(self) -> Admissions:
        """What has been counted about joining since this was last asked."""
        taken, self._admissions = self._admissions, Admissions()
        return taken

    def snapshot(self, now: float, most: int) -> Snapshot:
        """What a person wants to know who asks why a request waits; at the most so many rows of each sort."""
        limits, allowance = self._limits, self._allowance
        last, when = self._last_refusal or (None, now)
        return Snapshot(
            running=len(self._running),
            waiting=len(self._waiting),
            refusal=self._refusal,
            last_refusal=last,
            last_refused=round(now - when, 3) if last else None,
            context=self.context,
            context_peak=context_peak(self._running, limits.padded),
            context_limit=allowance.context,
            context_most=allowance.most_context,
            prefill_limit=allowance.prefill_tokens,
            prefill_most=allowance.most_prefill,
            max_batch_size=limits.max_batch_size,
            max_prefill_padding=limits.max_padding,
            max_waiting_tokens=limits.max_waiting_tokens,
            padded=limits.padded,
            chunked=limits.block_size > 0,
            rows=[_state(row, now) for row in islice(self._running, most)],
            queue=[_state(row, now) for row in islice(self._waiting, most)],
        )

    def _plan_whole(self, now: float) -> Plan | None:
        """A prefill of rows that can join now, else one token for every running row."""
        if self._waiting:
            if not self._slots():
                self._refusal = Refusal.BATCH_SIZE
            elif not self._pace.due(len(self._running), now):
                self._refusal = self._refusal or Refusal.PACE  # a weightier reason stays
            elif joining := self._join(WholeDoor(self._limits, self._allowance, self._running, self._admissions)):
                return Plan.whole(joining)
        return Plan.whole(list(self._running)) if self._running else None

    def _plan_chunked(self, pager: Pager) -> Plan | None:
        """A token for each row that decodes, and within the step's budget chunks of the prompts of others."""
        trial = self._trial()
        rows = [row for row in self._running if row.trial == trial]
        budget = self._chunk_pace.budget(rows, self._allowance.prefill_tokens)
        if self._waiting:
            self._join_trial(pager, trial, budget)
            rows = [row for row in self._running if row.trial == trial]
        preempted: list[Sequence] = []
        work = self._with_blocks(pager, rows, budget, preempted)
        if not work:  # a row on trial waits for the blocks that the others still have
            work = self._with_blocks(pager, self._running, budget, preempted)
        pager.look_ahead(work)
        return Plan.of([row for row, _ in work], [count for _, count in work], preempted) if work else None

    def _join_trial(self, pager: Pager, trial: int, budget: int) -> None:
        if not self._slots():
            self._refusal = Refusal.BATCH_SIZE
        elif self._waiting.first.trial != trial:
            self._refusal = Refusal.TRIAL
        else:
            usable = self._allowance.context // pager.size
            self._join(BlockDoor(pager, usable, self._running, budget, self._admissions))

    def _with_blocks(
        self, pager: Pager, rows: list[Sequence], budget: int, preempted: list[Sequence]
    ) -> list[tuple[Sequence, int]]:
        """Those rows that get the blocks they need: the oldest first, if need be from the youngest; with counts."""
        work: list[tuple[Sequence, int]] = []
        for row, count in zip(*share_out(rows, budget), strict=True):
            if row in preempted:
                break  # all that follow are younger still
            while not (enough := pager.reserve(row, count)) and row is not self._running[-1]:
                preempted.append(self._preempt())
            if not enough:
                break
            work.append((row, count))
        return work

    def _preempt(self) -> Sequence:
        """Queue the youngest row again, at its place by age."""
        row = self._running[-1]
        self._admissions.preemptions += 1
        self._remove(lambda other: other is row)
        self._waiting.insert(row)
        if self._waiting.first is row:
            self._refusal = Refusal.MEMORY
        return row

    def _trial(self) -> int:
        """Rows of which trial run now; 0 for all that are on none."""
        running = next((row.trial for row in self._running if row.trial), 0)
        return running or (self._waiting.first.trial if self._waiting else 0)

    def _slots(self) -> int:
        return self._limits.max_batch_size - len(self._running)

    def _join(self, door: Door) -> list[Sequence]:
        joining, self._refusal = choose(self._waiting, door, self._slots(), self._admissions)
        if joining:
            self._waiting.take(joining)
            self._running = sorted(self._running + joining, key=lambda row: row.age)
        return joining

    def _shrink(self, plan: Plan) -> None:
        """A step that computed prompts was too large itself; one that did not had too much context beside it."""
        padded = self._limits.padded
        if plan.prefill and len(plan.rows) > 1:
            self._allowance.shrink_prefill(sum(plan.counts) if self._pager else context_now(plan.rows, padded))
        if self._pager:
            self._allowance.shrink_context(self._pager.pool.used * self._pager.size)
        elif not plan.prefill or len(plan.rows) == 1:
            self._allowance.shrink_context(context_now(self._running, padded))

    def _end_of(self, row: Sequence, now: float) -> StopReason:
        """The order of front-end stopping, but for stop sequences, which need the text."""
        if row.late(now):
            return StopReason.TIME_LIMIT
        if row.generated < row.request.sampling.min_new_tokens:
            return StopReason.NOT_FINISHED
        if row.tokens[-1] in self._eos_ids:
            return StopReason.EOS_TOKEN
        if row.remaining <= 0:
            return StopReason.TOKEN_LIMIT if row.request.capped else StopReason.MAX_TOKENS
        return StopReason.NOT_FINISHED

    def _remove(self, leaves: Callable[[Sequence], bool]) -> list[Sequence]:
        gone = [row for row in self._running if leaves(row)]
        if gone:
            self._running = [row for row in self._running if not leaves(row)]
            if self._pager:
                self._pager.free(gone)
        return gone


def _state(row: Sequence, now: float) -> RowState:
    seconds = round(now - row.queued_at, 3)
    return RowState(row.id, seconds, row.prompt_length, row.computed, row.generated, row.remaining)
