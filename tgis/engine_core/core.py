"""The loop of the engine process: read messages, plan, step, commit, send."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from tgis.batcher.batcher import PAUSED_STEPS, Batcher
from tgis.batcher.capacity import padded_tokens
from tgis.batcher.sequence import Sequence, StepPlan
from tgis.engine_core.lookups import LookupTable
from tgis.engines.base import Engine, StepResult
from tgis.errors import OutOfMemory, StartError
from tgis.ipc.channel import Channel
from tgis.ipc.messages import (
    Cancel,
    Failed,
    FailureKind,
    FlushCache,
    GetBatchState,
    PromptLogprobs,
    Shutdown,
    Step,
    StepStats,
    Submit,
    ToEngine,
)
from tgis.ipc.request import Request, TokenLogprobs
from tgis.structured_output.matcher import MaskThreads
from tgis.utils.memory import return_unused_memory

log = logging.getLogger(__name__)

_DETAILS_PER_MESSAGE = 2048  # tokens and candidates
_MAX_SHOWN_SEQS = 100  # sequences of each kind: running and waiting


@dataclass(frozen=True, slots=True)
class EngineCore:
    """Owns the batcher and the engine."""

    channel: Channel
    engine: Engine
    batcher: Batcher
    lookups: LookupTable
    idle_seconds: float = 0.0  # after which memory is given back; 0: never
    masks: MaskThreads = field(default_factory=MaskThreads)

    def run(self) -> None:
        """Serve until Shutdown."""
        while self._handle(self._receive()):
            if expired := self.batcher.expire(time.monotonic()):
                ids, stop_reasons = [seq.id for seq in expired], [seq.stop_reason for seq in expired]
                self.channel.send(Step(ids, [[]] * len(expired), stop_reasons, [], None))
            plan = self.batcher.plan(time.monotonic())
            self._release(plan.to_release)
            if plan.seqs:
                self._step(plan)
            elif self.batcher.running:  # all wait for the tokens that their grammars allow
                self.masks.wait()
        self.masks.close()

    def _receive(self) -> list[ToEngine]:
        """The messages that have arrived; while nothing runs, wait for one, after a while with less memory."""
        if not self.batcher.idle:
            return self.channel.receive(timeout=0)
        if self.idle_seconds:
            if messages := self.channel.receive(timeout=self.idle_seconds):
                return messages
            if self.engine.clear_cache():
                self.batcher.forget_cached_prefixes()
            return_unused_memory()
        return self.channel.receive()

    def _handle(self, messages: list[ToEngine]) -> bool:
        for message in messages:
            match message:
                case Submit(requests, arrival_time):
                    self._submit(requests, arrival_time)
                case Cancel(ids):
                    self.batcher.cancel(ids)
                    self.lookups.release(ids)
                case GetBatchState():
                    self.channel.send(self.batcher.state(time.monotonic(), _MAX_SHOWN_SEQS))
                case FlushCache():
                    self.batcher.flush_cache()
                case Shutdown():
                    return False
                case _:
                    raise AssertionError(f"unexpected {type(message).__name__}")
        return True

    def _release(self, seqs: tuple[Sequence, ...]) -> None:
        self.engine.release(seqs)
        for seq in seqs:
            if seq.finished and seq.grammar is not None:  # others were preempted
                seq.grammar.abandon()

    def _submit(self, requests: list[Request], arrival_time: float) -> None:
        for seq in self.batcher.submit(requests, arrival_time):
            if seq.request.adapter:  # loaded before: validation needs its length, and its errors come first
                seq.adapter = self.lookups.found(seq.request.adapter.lookup_id).adapter
            if seq.request.grammar is not None:
                seq.grammar = self.lookups.found(seq.request.grammar).copy()

    def _step(self, plan: StepPlan) -> None:
        started_at = time.monotonic()
        try:
            result = self.engine.step(plan)
        except OutOfMemory as error:
            self._rollback(plan, FailureKind.OUT_OF_MEMORY, str(error))
        except StartError:
            raise  # the engine cannot go on
        except Exception as error:
            log.exception("a step of %d sequences failed", len(plan.seqs))
            self._rollback(plan, FailureKind.ERROR, f"{type(error).__name__}: {error}")
        else:
            self._commit(plan, result, started_at, time.monotonic())

    def _rollback(self, plan: StepPlan, kind: FailureKind, message: str) -> None:
        """Retry the sequences of a failed step, except one that failed alone."""
        failed = self.batcher.rollback(plan, out_of_memory=kind is FailureKind.OUT_OF_MEMORY)
        log.warning("%d sequences of a failed step (%s) will be retried", len(plan.seqs) - len(failed), kind)
        if kind is FailureKind.OUT_OF_MEMORY and (plan.proposals or plan.drafts):
            log.warning("speculation pauses for %d steps, since a step with proposals ran out of memory", PAUSED_STEPS)
        self.channel.send(Failed([seq.id for seq in failed], kind, message, plan.has_prefill))

    def _commit(self, plan: StepPlan, result: StepResult, started_at: float, computed_at: float) -> None:
        make_stats = _observe(plan, self.batcher, padded=self.engine.info.padded)
        if result.failed:
            plan, result = self._drop_failed(plan, result)
        tokens = self.batcher.commit(plan, result.tokens, computed_at, result.verified)
        stats = make_stats(started_at, computed_at)
        self._send_prompt_logprobs(plan.sampled, result.prompt_logprobs)
        ids, stop_reasons = [seq.id for seq in plan.sampled], [seq.stop_reason for seq in plan.sampled]
        logprobs = [details[: len(new)] for details, new in zip(result.logprobs, tokens, strict=False)]
        self.channel.send(Step(ids, tokens, stop_reasons, logprobs, stats))
        self.masks.prepare(
            (seq.grammar, seq.tokens[seq.prompt_length :])
            for seq in plan.sampled
            if seq.grammar is not None and not seq.finished
        )

    def _drop_failed(self, plan: StepPlan, result: StepResult) -> tuple[StepPlan, StepResult]:
        """Fail the sequences that the engine could not sample for; returns the step of the others."""
        self.batcher.drop([seq for seq in plan.seqs if seq.id in result.failed])
        for request_id, (kind, reason) in result.failed.items():
            self.channel.send(Failed([request_id], kind, reason))
        kept = [index for index, seq in enumerate(plan.sampled) if seq.id not in result.failed]
        tokens = [result.tokens[index] for index in kept]
        logprobs = [result.logprobs[index] for index in kept] if result.logprobs else []
        return plan.without(result.failed), replace(result, tokens=tokens, logprobs=logprobs)

    def _send_prompt_logprobs(self, seqs: list[Sequence], prompt_logprobs: dict[int, list[TokenLogprobs]]) -> None:
        """Send prompt logprobs in messages of a bounded size, since the front end handles one message at a time."""
        if not prompt_logprobs:
            return
        for seq in seqs:
            size = max(_DETAILS_PER_MESSAGE // seq.request.logprob_options.details_per_token, 1)
            logprobs = prompt_logprobs.get(seq.id, [])
            for start in range(0, len(logprobs), size):
                self.channel.send(PromptLogprobs.encode(seq.id, logprobs[start : start + size]))


def _observe(plan: StepPlan, batcher: Batcher, *, padded: bool) -> Callable[[float, float], StepStats]:
    """Look at a step before it is committed or any of its sequences dropped: failed ones count.

    What is returned makes the statistics, once and after the commit, of when the step started and when the engine
    returned.
    """
    num_prefill_tokens = plan.num_prefill_tokens
    num_prefills, num_decodes = len(num_prefill_tokens), len(plan.seqs) - len(num_prefill_tokens)
    prompt_tokens = sum(
        _count_prompt(seq, count)
        for seq, count in zip(plan.seqs, plan.num_scheduled_tokens, strict=True)
        if seq.num_counted_tokens < seq.prompt_length  # also where the last token of a prompt looks like a decode
    )
    started_seqs = [seq for seq in plan.seqs if not seq.num_computed_tokens]
    first_scheduled = [(seq, seq.num_computed_tokens) for seq in batcher.running if not seq.was_scheduled]
    had_running = any(seq.num_computed_tokens for seq in batcher.running)

    def make_stats(started_at: float, computed_at: float) -> StepStats:
        return StepStats(
            prefill=plan.has_prefill,
            num_prefills=num_prefills,
            num_decodes=num_decodes,
            prefill_tokens=padded_tokens(num_prefill_tokens, padded),
            duration=time.monotonic() - started_at,
            forward_duration=computed_at - started_at,
            num_running=len(batcher.running),
            context_tokens=batcher.context_tokens,
            remaining_tokens=sum(seq.num_remaining_tokens for seq in batcher.running),
            concatenated=had_running and not all(seq.finished for seq in started_seqs),
            num_requeued=batcher.waiting.num_requeued,
            first_scheduled={seq.id: (started_at - seq.arrival_time, cached) for seq, cached in first_scheduled},
            prompt_tokens=prompt_tokens,
            counters=batcher.take_counters(),
            token_capacity=batcher.context_limit,
        )

    return make_stats


def _count_prompt(seq: Sequence, num_scheduled_tokens: int) -> int:
    """The number of input tokens that the step computes for the first time; after preemption they do not count
    again.
    """
    before = max(seq.num_counted_tokens, seq.request.soft_prompt_length)
    seq.num_counted_tokens = max(before, min(seq.num_computed_tokens + num_scheduled_tokens, seq.prompt_length))
    return seq.num_counted_tokens - before
