"""Which requests run in the next step, and when each one ends.

The batcher owns every sequence from submission to its end: the waiting room, the running rows, and all stop
reasons that need no text. It never reads a clock: `now` is passed in. A step is `plan`, then `commit` once the
engine has computed it, or `retreat` if the engine could not.
"""

from collections.abc import Callable, Collection, Iterable
from itertools import islice

from tgis.batcher.admission import (
    Admission,
    PaddedAdmission,
    PagedAdmission,
    current_context_tokens,
    peak_context_tokens,
    select_waiting,
)
from tgis.batcher.allowance import CapacityLimits
from tgis.batcher.block_manager import BlockManager
from tgis.batcher.fault_isolation import FaultIsolator
from tgis.batcher.memory_model import BatchLimits
from tgis.batcher.pace import PrefillInterleaving
from tgis.batcher.prefill_budget import PrefillBudget, split_budget
from tgis.batcher.sequence import Sequence, StepPlan
from tgis.batcher.waiting_queue import WaitingQueue
from tgis.ipc.messages import AdmissionCounters
from tgis.ipc.request import Request, StopReason
from tgis.ipc.snapshot import RequestState, Snapshot, WaitReason

Scheduled = tuple[Sequence, int]  # and how many of its tokens the step computes


class Batcher:
    """Continuous batching: rows join and leave at any step."""

    def __init__(self, limits: BatchLimits, eos_ids: Collection[int]) -> None:
        self._limits = limits
        self._eos_ids = frozenset(eos_ids)
        self._waiting = WaitingQueue()
        self._running: list[Sequence] = []
        self._to_release: list[Sequence] = []  # by the next plan
        self._capacity = CapacityLimits(limits)
        self._interleaving = PrefillInterleaving(limits.max_waiting_tokens)
        self._prefill_budget = PrefillBudget(limits.prefill_tokens, limits.max_slowdown)
        self._block_manager = BlockManager.from_limits(limits) if limits.block_size else None
        self._fault_isolator = FaultIsolator()
        self._counters = AdmissionCounters()
        self._wait_reason: WaitReason | None = None  # of the first that waits
        self._last_wait_reason: tuple[WaitReason, float] | None = None  # and when

    @property
    def num_waiting(self) -> int:
        """Requests that are in no step at present."""
        return len(self._waiting)

    @property
    def num_requeued(self) -> int:
        """Requests among them that have been in a step before."""
        return self._waiting.num_requeued

    @property
    def num_running(self) -> int:
        """Rows that the engine holds."""
        return len(self._running)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do until the next message."""
        return not (self._waiting or self._running or self._to_release)

    @property
    def running_seqs(self) -> list[Sequence]:
        """The running rows, as they are now; not to be changed."""
        return self._running

    @property
    def context_tokens(self) -> int:
        """Tokens of context of the running rows, padding included."""
        return current_context_tokens(self._running, self._limits.padded)

    @property
    def context_limit(self) -> int:
        """Tokens of context that a batch may have at present."""
        return self._capacity.context_tokens

    def submit(self, requests: Iterable[Request], at: float) -> list[Sequence]:
        """Queue the inputs of one call, in order; `at` is when they came, no earlier than those before them."""
        rows = [Sequence(request, at) for request in requests]
        self._waiting.append(rows)
        return rows

    def cancel(self, ids: Collection[int]) -> None:
        """Drop requests, wherever they are. Unknown ids are those of finished requests."""
        gone = frozenset(ids)
        waiting = self._waiting.remove_ids(gone)
        if waiting:
            self._wait_reason = None  # it may have been one of theirs
        for row in [*waiting, *self._remove_running(lambda row: row.id in gone)]:
            row.stop_reason = StopReason.CANCELLED

    def expire(self, now: float) -> list[Sequence]:
        """End what waits, or is in the middle of its prompt, and is late: TIME_LIMIT and no further token."""
        expired = self._waiting.expire(now)
        if expired:
            self._wait_reason = None  # it may have been one of theirs
        if self._block_manager:
            expired += self._remove_running(lambda row: not row.decoding and row.expired(now))
        for row in expired:
            row.stop_reason = StopReason.TIME_LIMIT
        return expired

    def plan(self, now: float) -> StepPlan:
        """The next step; without sequences if nothing can run. They stay as they are until `commit` or `rollback`."""
        work = self._schedule_paged(self._block_manager) if self._block_manager else self._schedule_padded(now)
        plan = StepPlan.of([seq for seq, _ in work], [count for _, count in work], self._to_release)
        self._to_release = []
        self._interleaving.step_started(now)
        self._prefill_budget.step_started(plan, now)
        if self._wait_reason is not None:
            self._last_wait_reason = self._wait_reason, now
        return plan

    def commit(self, plan: StepPlan, tokens: list[list[int]], now: float) -> list[Sequence]:
        """Append the new tokens of each sampled sequence, up to the one that ends it; return the sequences that ended.

        Only scheduled tokens count as computed: of several new tokens the next step computes all.
        """
        for row, count in zip(plan.seqs, plan.num_scheduled_tokens, strict=True):
            row.num_computed_tokens += count
            if self._block_manager:
                self._block_manager.cache_full_blocks(row)
        for row, new_tokens in zip(plan.sampled, tokens, strict=True):
            self._append(row, new_tokens, now)
        for row in self._running:
            row.was_scheduled = True
        self._capacity.step_succeeded()
        self._interleaving.step_succeeded(plan, now)
        self._prefill_budget.step_succeeded(now)
        return self._remove_running(lambda row: row.stop_reason is not StopReason.NOT_FINISHED)

    def drop(self, rows: Collection[Sequence]) -> None:
        """Forget rows that got an error instead of a token."""
        gone = {id(row) for row in rows}
        for row in self._remove_running(lambda row: id(row) in gone):
            row.stop_reason = StopReason.ERROR

    def rollback(self, plan: StepPlan, *, out_of_memory: bool) -> list[Sequence]:
        """A step failed: queue its sequences in front, to be computed anew.

        Returns the rows that are refused instead, because they have failed alone.
        """
        self._interleaving.step_failed(plan)
        alone = len(plan.seqs) == 1
        if out_of_memory:
            self._shrink_capacity(plan)
            refused = plan.seqs if alone and len(self._running) == 1 else []
            groups = [plan.seqs]
        else:
            refused, groups = self._fault_isolator.split(plan.seqs)
        for row in plan.seqs:
            row.num_computed_tokens = 0
        self.drop(refused)
        again = [row for group in groups for row in group if row.stop_reason is StopReason.NOT_FINISHED]
        back = {id(row) for row in again}
        self._remove_running(lambda row: id(row) in back)
        self._waiting.requeue_front(again)
        self._wait_reason = None  # it was of those behind them
        return refused

    def take_counters(self) -> AdmissionCounters:
        """What has been counted about joining since this was last asked."""
        taken, self._counters = self._counters, AdmissionCounters()
        return taken

    def snapshot(self, now: float, max_seqs: int) -> Snapshot:
        """What a person wants to know who asks why a request waits; at the most so many rows of each sort."""
        limits, allowance = self._limits, self._capacity
        last, when = self._last_wait_reason or (None, now)
        return Snapshot(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            wait_reason=self._wait_reason,
            last_wait_reason=last,
            seconds_since_last_wait=round(now - when, 3) if last else None,
            context_tokens=self.context_tokens,
            peak_context_tokens=peak_context_tokens(self._running, limits.padded),
            token_capacity=allowance.context_tokens,
            initial_token_capacity=allowance.max_context_tokens,
            max_prefill_tokens=allowance.prefill_tokens,
            initial_max_prefill_tokens=allowance.max_prefill_tokens,
            max_batch_size=limits.max_batch_size,
            max_prefill_padding=limits.max_prefill_padding,
            max_waiting_tokens=limits.max_waiting_tokens,
            padded=limits.padded,
            chunked_prefill=limits.block_size > 0,
            running_requests=[_state(row, now) for row in islice(self._running, max_seqs)],
            waiting_requests=[_state(row, now) for row in islice(self._waiting, max_seqs)],
        )

    def _schedule_padded(self, now: float) -> list[Scheduled]:
        """A prefill of rows that can join now, else one token for every running row."""
        seqs = self._running
        if self._waiting:
            if not self._free_slots():
                self._wait_reason = WaitReason.BATCH_SIZE
            elif not self._interleaving.may_prefill(len(self._running), now):
                self._wait_reason = self._wait_reason or WaitReason.DECODE_TURN  # a weightier reason stays
            else:
                admission = PaddedAdmission(self._limits, self._capacity, self._running, self._counters)
                seqs = self._admit(admission) or self._running
        return [(seq, seq.num_uncomputed_tokens) for seq in seqs]

    def _schedule_paged(self, block_manager: BlockManager) -> list[Scheduled]:
        """A token for each row that decodes, and within the step's budget chunks of the prompts of others."""
        trial = self._active_retry_group()
        rows = [row for row in self._running if row.retry_group == trial]
        budget = self._prefill_budget.budget(rows, self._capacity.prefill_tokens)
        if self._waiting:
            self._admit_paged(block_manager, trial, budget)
            rows = [row for row in self._running if row.retry_group == trial]
        work = self._allocate_blocks(block_manager, rows, budget)
        if not work:  # a row on trial waits for the blocks that the others still have
            work = self._allocate_blocks(block_manager, self._running, budget)
        block_manager.allocate_lookahead(work)
        return work

    def _admit_paged(self, block_manager: BlockManager, retry_group: int, budget: int) -> None:
        if not self._free_slots():
            self._wait_reason = WaitReason.BATCH_SIZE
        elif self._waiting.first.retry_group != retry_group:
            self._wait_reason = WaitReason.RETRY
        else:
            usable = self._capacity.context_tokens // block_manager.block_size
            self._admit(PagedAdmission(block_manager, usable, self._running, budget, self._counters))

    def _allocate_blocks(self, block_manager: BlockManager, rows: list[Sequence], budget: int) -> list[Scheduled]:
        """Those rows that get the blocks they need: the oldest first, if need be from the youngest; with counts."""
        work: list[Scheduled] = []
        for row, count in zip(*split_budget(rows, budget), strict=True):
            if row.arrival_order > self._running[-1].arrival_order:
                break  # preempted, as all that follow: they are younger still
            while not (enough := block_manager.allocate(row, count)) and row is not self._running[-1]:
                self._preempt()
            if not enough:
                break
            work.append((row, count))
        return work

    def _preempt(self) -> None:
        """Queue the youngest row again, at its place by age."""
        row = self._running[-1]
        self._counters.preemptions += 1
        self._remove_running(lambda other: other is row)
        self._waiting.requeue_in_order(row)
        if self._waiting.first is row:
            self._wait_reason = WaitReason.MEMORY

    def _active_retry_group(self) -> int:
        """Rows of which trial run now; 0 for all that are on none."""
        running = next((row.retry_group for row in self._running if row.retry_group), 0)
        return running or (self._waiting.first.retry_group if self._waiting else 0)

    def _free_slots(self) -> int:
        return self._limits.max_batch_size - len(self._running)

    def _admit(self, admission: Admission) -> list[Sequence]:
        joining, self._wait_reason = select_waiting(self._waiting, admission, self._free_slots(), self._counters)
        if joining:
            self._waiting.pop(joining)
            self._running = sorted(self._running + joining, key=lambda row: row.arrival_order)
        return joining

    def _shrink_capacity(self, plan: StepPlan) -> None:
        """A step that computed prompts was too large itself; one that did not had too much context beside it."""
        padded = self._limits.padded
        if plan.has_prefill and len(plan.seqs) > 1:
            self._capacity.shrink_prefill(
                sum(plan.num_scheduled_tokens) if self._block_manager else current_context_tokens(plan.seqs, padded)
            )
        if self._block_manager:
            self._capacity.shrink_context(self._block_manager.pool.num_used * self._block_manager.block_size)
        elif not plan.has_prefill or len(plan.seqs) == 1:
            self._capacity.shrink_context(current_context_tokens(self._running, padded))

    def _append(self, row: Sequence, tokens: list[int], now: float) -> None:
        assert tokens, "a sampled sequence gets at least one token"
        for token in tokens:
            row.tokens.append(token)
            row.stop_reason = self._stop_reason(row, now)
            if row.stop_reason is not StopReason.NOT_FINISHED:
                break  # nobody asked for what follows
        row.solo_failures = row.retry_group = 0

    def _stop_reason(self, row: Sequence, now: float) -> StopReason:
        """The order of front-end stopping, but for stop sequences, which need the text."""
        if row.expired(now):
            return StopReason.TIME_LIMIT
        if row.num_generated_tokens < row.request.sampling_params.min_new_tokens:
            return StopReason.NOT_FINISHED
        if row.tokens[-1] in self._eos_ids:
            return StopReason.EOS_TOKEN
        if row.num_remaining_tokens <= 0:
            return StopReason.TOKEN_LIMIT if row.request.limited_by_context else StopReason.MAX_TOKENS
        return StopReason.NOT_FINISHED

    def _remove_running(self, predicate: Callable[[Sequence], bool]) -> list[Sequence]:
        gone = [row for row in self._running if predicate(row)]
        if gone:
            self._running = [row for row in self._running if not predicate(row)]
            self._to_release += gone
            if self._block_manager:
                self._block_manager.free(gone)
        return gone


def _state(row: Sequence, now: float) -> RequestState:
    seconds = round(now - row.arrival_time, 3)
    return RequestState(
        row.id, seconds, row.prompt_length, row.num_computed_tokens, row.num_generated_tokens, row.num_remaining_tokens
    )
