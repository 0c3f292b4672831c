"""Decides which sequences run in each step, and when each one ends.

The batcher owns every sequence from submission to its end: the waiting queue, the running batch, and all stop reasons
that need no text. It never reads a clock: `now` is passed in. A step is `plan`, then `commit` once the engine has
computed it, or `rollback` if it could not.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from itertools import islice

from tgis.batcher.admission import PaddedAdmission, PagedAdmission, select_waiting
from tgis.batcher.block_manager import BlockManager
from tgis.batcher.capacity import BatchLimits, CapacityLimits, padded_tokens
from tgis.batcher.prefill_budget import PrefillBudget, PrefillInterleaving, split_budget, split_whole
from tgis.batcher.sequence import Sequence, StepPlan, num_common
from tgis.batcher.waiting_queue import WaitingQueue
from tgis.ipc.messages import BatcherCounters, BatchState, RequestState, WaitReason
from tgis.ipc.request import Request, StopReason
from tgis.speculation.lookup import Lookup
from tgis.speculation.speculator import Speculator

MIN_ANSWER_SECONDS = 0.05  # least time between a decision and the answer at the client, however short the steps are
# Steps without proposals after one with proposals ran out of memory: one token per sequence may fit.
PAUSED_STEPS = 4096
_MAX_SOLO_FAILURES = 2  # one may be an accident

Scheduled = tuple[Sequence, int]  # and the number of its tokens that the step computes


class Batcher:
    """Continuous batching: sequences join and leave at any step."""

    def __init__(self, limits: BatchLimits, eos_ids: Collection[int]) -> None:
        self._limits = limits
        self._eos_ids = frozenset(eos_ids)
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []  # sorted by turn; callers must not change the list
        self._to_release: list[Sequence] = []  # released by the next plan
        self._num_steps = 0  # successful steps
        self._num_generated_tokens = 0
        self._planned_at = 0.0
        self._step_seconds = 0.0  # duration of the last step
        self._capacity = CapacityLimits(limits)
        self._interleaving = PrefillInterleaving(limits.max_waiting_tokens)
        self._prefill_budget = PrefillBudget(limits.prefill_tokens, limits.max_prefill_gap_ms)
        self._block_manager = BlockManager(limits) if limits.block_size else None
        self._speculator: Speculator | None = None
        if most := limits.proposed_tokens:
            drafts = limits.drafted_tokens, limits.max_drafting
            self._speculator = Speculator(most, max(limits.max_batch_size, 1 + most), limits.vocab_size, *drafts)
        self._next_proposal_step = 0
        self._last_retry_group = 0
        self._counters = BatcherCounters()
        self._wait_reason: WaitReason | None = None  # why the first request in the queue waits

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do, or to release, until the next message."""
        return not (self.waiting or self.running or self._to_release)

    @property
    def context_tokens(self) -> int:
        """Tokens of context of the running sequences, padding included."""
        return self._context_of(self.running)

    @property
    def context_limit(self) -> int:
        """Tokens of context that a batch may have now."""
        return self._capacity.context_tokens

    def submit(self, requests: Iterable[Request], arrival_time: float) -> list[Sequence]:
        """Queue the inputs of one call, in order; they arrived no earlier than those before them."""
        seqs = [Sequence(request, arrival_time, self._num_steps) for request in requests]
        self.waiting.append(seqs, self.running)
        return seqs

    def cancel(self, ids: Collection[int]) -> None:
        """Drop requests, waiting or running. Ids of finished requests are ignored."""
        gone = frozenset(ids)
        waiting = self.waiting.remove(gone)
        if waiting:
            self._wait_reason = None  # it may have been one of theirs
        for seq in [*waiting, *self._remove_running(lambda seq: seq.id in gone)]:
            seq.stop_reason = StopReason.CANCELLED

    def expire(self, now: float) -> list[Sequence]:
        """End waiting requests past their deadline with TIME_LIMIT and no further token, if they have waited through a
        step.

        Requests that have just arrived may be in one step, and a prefill under way goes on: both end with a token.
        """
        expired = self.waiting.expire(now, self._next_answer(now), self._num_steps)
        if expired:
            self._wait_reason = None  # it may have been one of theirs
        for seq in expired:
            seq.stop_reason = StopReason.TIME_LIMIT
        return expired

    def plan(self, now: float) -> StepPlan:
        """The next step; without sequences if nothing can run. They stay as they are until `commit` or `rollback`."""
        work = self._schedule_paged(self._block_manager) if self._block_manager else self._schedule_padded(now)
        plan = StepPlan.of([seq for seq, _ in work], [count for _, count in work], self._to_release)
        if self._speculator and plan.seqs and self._block_manager and self._num_steps >= self._next_proposal_step:
            plan = self._with_proposals(self._speculator, self._block_manager, plan)
        self._to_release = []
        self._planned_at = now
        return plan

    def commit(
        self, plan: StepPlan, tokens: list[list[int]], now: float, verified: Mapping[int, list[int]] = {}
    ) -> list[list[int]]:
        """Append the new tokens of each sampled sequence, up to the one that ends it, and return those appended.

        `verified` are the proposed and drafted tokens that the engine computed, by request id. Scheduled tokens count
        as computed, and verified ones that were kept; tokens that a grammar forces are computed in the next step.
        """
        self._num_steps += 1
        self._step_seconds = now - self._planned_at
        self._prefill_budget.step_succeeded(plan, self._step_seconds)
        if self._speculator and not plan.has_prefill:
            self._count_step(self._speculator, plan, verified)
        kept = [self._append(seq, new, now) for seq, new in zip(plan.sampled, tokens, strict=True)]
        for seq, count in zip(plan.seqs, plan.num_scheduled_tokens, strict=True):
            seq.num_computed_tokens += count
            proposed, kept_proposals = verified.get(seq.id, []), 0
            if seq.id in plan.proposals or seq.id in plan.drafts:
                kept_proposals = self._commit_proposals(seq, proposed, seq.id in plan.drafts)
                seq.num_computed_tokens += kept_proposals
            if self._block_manager:
                self._block_manager.step_succeeded(seq, rejected=kept_proposals < len(proposed))
        for seq in self.running:
            seq.was_scheduled = True
        self._capacity.step_succeeded()
        self._interleaving.step_succeeded(plan, now, self._step_seconds)
        self._remove_running(lambda seq: seq.finished)
        return kept

    def drop(self, seqs: Iterable[Sequence]) -> None:
        """Remove sequences that get an error instead of a token."""
        gone = set(seqs)
        for seq in self._remove_running(gone.__contains__):
            seq.stop_reason = StopReason.ERROR

    def rollback(self, plan: StepPlan, *, out_of_memory: bool) -> list[Sequence]:
        """A step failed: requeue its sequences, to be recomputed.

        Returns the sequences that are dropped instead, because they failed alone.
        """
        self._interleaving.step_failed(plan)
        if out_of_memory and (plan.proposals or plan.drafts):
            self._next_proposal_step = self._num_steps + PAUSED_STEPS
            failed = []
        elif out_of_memory:
            self._shrink_capacity(plan)
            failed = plan.seqs if len(self.running) == 1 else []
        else:
            failed = self._isolate_fault(plan.seqs)
        self.drop(failed)
        requeued = [seq for seq in plan.seqs if not seq.finished]
        self._remove_running(set(requeued).__contains__)
        for seq in requeued:
            seq.num_computed_tokens, seq.queued_at_step = 0, self._num_steps
        self.waiting.requeue(requeued)
        self._wait_reason = None  # it was of those behind them
        return failed

    def forget_cached_prefixes(self) -> None:
        """The engine has lost its KV cache while nothing ran or waited."""
        assert self.idle
        if self._block_manager:
            self._block_manager = BlockManager(self._limits)

    def flush_cache(self) -> None:
        """Let no later request find a cached prefix; running ones keep their blocks."""
        if self._block_manager:
            self._block_manager.flush()

    @property
    def touched_share(self) -> float:
        """The share of the KV blocks that have been used since the prefixes were forgotten."""
        pool = self._block_manager.pool if self._block_manager else None
        return pool.num_touched / pool.num_blocks if pool else 0.0

    def take_counters(self) -> BatcherCounters:
        """The counts since the last call."""
        taken, self._counters = self._counters, BatcherCounters()
        return taken

    def state(self, now: float, max_seqs: int) -> BatchState:
        """What runs and waits, with at most `max_seqs` sequences of each."""
        limits, capacity = self._limits, self._capacity
        return BatchState(
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            wait_reason=self._wait_reason,
            total_generated_tokens=self._num_generated_tokens,
            context_tokens=self.context_tokens,
            token_capacity=capacity.context_tokens,
            initial_token_capacity=limits.token_capacity,
            max_prefill_tokens=capacity.prefill_tokens,
            initial_max_prefill_tokens=limits.prefill_tokens,
            max_batch_size=limits.max_batch_size,
            running_requests=[_state(seq, now) for seq in islice(self.running, max_seqs)],
            waiting_requests=[_state(seq, now) for seq in islice(self.waiting, max_seqs)],
        )

    def _schedule_padded(self, now: float) -> list[Scheduled]:
        """A prefill of the sequences that can join now, else one token for each running sequence."""
        seqs = self.running
        if self.waiting:
            if not self._free_slots():
                self._wait_reason = WaitReason.BATCH_SIZE
            elif not self._interleaving.may_prefill(len(self.running), now):
                self._wait_reason = self._wait_reason or WaitReason.DECODES_FIRST  # keep a weightier reason
            else:
                admission = PaddedAdmission(self._limits, self._capacity, self.running, self._counters)
                seqs = self._admit(admission) or self.running
        return [(seq, seq.num_uncomputed_tokens) for seq in seqs]

    def _schedule_paged(self, block_manager: BlockManager) -> list[Scheduled]:
        """One token for each sequence that decodes, and chunks of the prompts of others within the step's budget."""
        retry_group = self._active_retry_group()
        seqs = [seq for seq in self.running if seq.retry_group == retry_group]  # who is not ready waits for the step
        budget = self._prefill_budget.budget(seqs, self._capacity.prefill_tokens)
        if self.waiting:
            self._admit_paged(block_manager, retry_group, budget)
        scheduled = self._allocate_blocks(block_manager, self._ready(retry_group), budget)
        if not scheduled:  # a sequence that is retried waits for blocks that the others hold
            scheduled = self._allocate_blocks(block_manager, self._ready(), budget)
        block_manager.allocate_lookahead(scheduled)
        if block_manager.states:
            block_manager.states.plan_snapshots(scheduled)
        return scheduled

    def _with_proposals(self, speculator: Speculator, block_manager: BlockManager, plan: StepPlan) -> StepPlan:
        """Add proposals and drafts to a step that only decodes, as far as there are free blocks."""
        seqs = plan.seqs
        if not all(seq.decoding and not seq.retry_group for seq in seqs) or not speculator.policy.may_pay(len(seqs)):
            return plan
        proposals, drafts = dict[int, list[int]](), dict[int, int]()
        asked = [seq for seq in seqs if seq.speculative]
        for seq in asked:
            request = seq.request
            seq.lookup = seq.lookup or Lookup(
                seq.tokens, request.soft_prompt_length, request.prediction, seq.prompt_length
            )
        lookups = [(seq.lookup, seq.num_remaining_tokens - 1) for seq in asked if seq.lookup]
        for seq, tokens in zip(asked, speculator.propose(len(seqs), lookups), strict=True):
            count = tokens if isinstance(tokens, int) else seq.num_allowed(tokens)
            count = block_manager.allocate_proposals(seq, count)
            if not count:
                continue
            if isinstance(tokens, int):
                drafts[seq.id] = count
            else:
                proposals[seq.id] = tokens[:count]
        return replace(plan, proposals=proposals, drafts=drafts)

    def _count_step(self, speculator: Speculator, plan: StepPlan, verified: Mapping[int, list[int]]) -> None:
        """Learn from a step that only decodes. One in which the draft model has read a prompt tells nothing."""
        drafted = {request_id: len(verified.get(request_id, ())) for request_id in plan.drafts}
        if drafted == plan.drafts:
            rows = len(plan.seqs) + sum(map(len, verified.values()))
            speculator.policy.step_succeeded(rows, self._step_seconds, max(drafted.values(), default=0))

    def _commit_proposals(self, seq: Sequence, verified: list[int], drafted: bool) -> int:
        """Free the blocks of rejected tokens; returns the number of verified tokens that were kept, and are computed
        because others follow them.
        """
        assert self._block_manager
        new = seq.tokens[seq.num_computed_tokens :]
        kept = num_common(verified, new[:-1])
        self._block_manager.free_unused(seq)
        counters = self._counters
        if drafted:
            counters.drafted_tokens += len(verified)
            counters.accepted_drafted_tokens += kept
            if self._speculator and seq.lookup:
                self._speculator.drafted(seq.lookup, verified, new[: kept + 1])
        else:
            counters.proposed_tokens += len(verified)
            counters.accepted_tokens += kept
        return kept

    def _ready(self, retry_group: int | None = None) -> list[Sequence]:
        """The running sequences, of all groups or of one."""
        return [seq for seq in self.running if seq.ready and retry_group in (None, seq.retry_group)]

    def _admit_paged(self, block_manager: BlockManager, retry_group: int, budget: int) -> None:
        if not self._free_slots():
            self._wait_reason = WaitReason.BATCH_SIZE
        elif self.waiting.first.retry_group != retry_group:
            self._wait_reason = WaitReason.RETRY
        else:
            max_blocks = self._capacity.context_tokens // block_manager.block_size
            self._admit(PagedAdmission(block_manager, max_blocks, self.running, budget, self._counters))

    def _allocate_blocks(self, block_manager: BlockManager, seqs: list[Sequence], budget: int) -> list[Scheduled]:
        """The sequences that get the blocks they need, in the order of their turns; the last ones may be preempted."""
        scheduled: list[Scheduled] = []
        if self._limits.encoder_decoder:
            chunks = split_whole(seqs, budget)
        else:
            chunks = split_budget(seqs, budget, self._capacity.prefill_tokens)
        for seq, count in chunks:
            if seq.turn > self.running[-1].turn:
                break  # preempted, and the turns of all that follow are later still
            while not (allocated := block_manager.allocate(seq, count)) and seq is not self.running[-1]:
                self._preempt()
            if not allocated:
                break
            scheduled.append((seq, count))
        return scheduled

    def _preempt(self) -> None:
        """Requeue the running sequence whose turn is last, where its turn is."""
        seq = self.running[-1]
        self._counters.preemptions += 1
        self._remove_running(lambda other: other is seq)
        seq.queued_at_step = self._num_steps
        self.waiting.requeue([seq])
        if self.waiting.first is seq:
            self._wait_reason = WaitReason.MEMORY

    def _active_retry_group(self) -> int:
        """The group that runs now, apart from all others; 0 is that of sequences in no failed step."""
        running = next((seq.retry_group for seq in self.running if seq.retry_group), 0)
        return running or (self.waiting.first.retry_group if self.waiting else 0)

    def _isolate_fault(self, seqs: list[Sequence]) -> list[Sequence]:
        """A step of these sequences failed: retry them in halves, down to the one that breaks steps alone, which is
        returned. A sequence that gets a token leaves its retry group.
        """
        middle = len(seqs) // 2
        for half in (seqs[:middle], seqs[middle:]):
            self._last_retry_group += 1
            for seq in half:
                seq.retry_group = self._last_retry_group
        if len(seqs) > 1:
            return []
        seqs[0].solo_failures += 1
        return seqs if seqs[0].solo_failures >= _MAX_SOLO_FAILURES else []

    def _free_slots(self) -> int:
        return self._limits.max_batch_size - len(self.running)

    def _admit(self, admission: PaddedAdmission | PagedAdmission) -> list[Sequence]:
        admitted, self._wait_reason = select_waiting(
            self.waiting, self.running, admission, self._free_slots(), self._counters
        )
        if admitted:
            self.waiting.remove({seq.id for seq in admitted})
            self.running = sorted(self.running + admitted, key=lambda seq: seq.turn)
        return admitted

    def _shrink_capacity(self, plan: StepPlan) -> None:
        """A step that computed prompts was too large itself; one that did not had too much context beside it."""
        manager = self._block_manager
        if plan.has_prefill and len(plan.seqs) > 1:
            self._capacity.shrink_prefill(sum(plan.num_scheduled_tokens) if manager else self._context_of(plan.seqs))
        if manager:
            self._capacity.shrink_context(manager.pool.num_used * manager.block_size)
        elif not plan.has_prefill or len(plan.seqs) == 1:
            self._capacity.shrink_context(self.context_tokens)

    def _append(self, seq: Sequence, tokens: list[int], now: float) -> list[int]:
        """Append tokens up to the one that ends the sequence, and return these."""
        assert tokens, "a sampled sequence gets at least one token"
        seq.solo_failures = seq.retry_group = 0
        for count, token in enumerate(tokens, 1):
            seq.tokens.append(token)
            self._num_generated_tokens += 1
            seq.stop_reason = self._stop_reason(seq, now)
            if seq.finished:
                return tokens[:count]
        return tokens

    def _stop_reason(self, seq: Sequence, now: float) -> StopReason:
        """The stop reason after the newest token, in TGIS's order. Stop sequences, which need the text, are not
        here.
        """
        if seq.expired(now, self._next_answer(now)):
            return StopReason.TIME_LIMIT
        params, token = seq.request.sampling_params, seq.tokens[-1]
        is_eos = token in self._eos_ids
        if is_eos and seq.grammar is not None:
            return StopReason.EOS_TOKEN  # nothing can follow, below the minimum neither
        if seq.num_generated_tokens < params.min_new_tokens:
            return StopReason.NOT_FINISHED
        if (is_eos and not params.ignore_eos) or token in params.stop_token_ids:
            return StopReason.EOS_TOKEN
        if seq.num_remaining_tokens <= 0:
            return StopReason.TOKEN_LIMIT if seq.request.limited_by_context else StopReason.MAX_TOKENS
        return StopReason.NOT_FINISHED

    def _next_answer(self, now: float) -> float:
        """The time at which a client would get the output of a sequence that ends after one more step."""
        return now + max(MIN_ANSWER_SECONDS, 2 * self._step_seconds)

    def _remove_running(self, predicate: Callable[[Sequence], bool]) -> list[Sequence]:
        removed = [seq for seq in self.running if predicate(seq)]
        if removed:
            self.running = [seq for seq in self.running if not predicate(seq)]
            self._to_release += removed
            for seq in removed:
                seq.lookup = None
            if self._block_manager:
                self._block_manager.free(removed)
        return removed

    def _context_of(self, seqs: list[Sequence]) -> int:
        return padded_tokens([len(seq.tokens) for seq in seqs], self._limits.padded)


def _state(seq: Sequence, now: float) -> RequestState:
    seconds = round(now - seq.arrival_time, 3)
    computed, generated = seq.num_computed_tokens, seq.num_generated_tokens
    return RequestState(seq.id, seconds, seq.prompt_length, computed, generated, seq.num_remaining_tokens)
