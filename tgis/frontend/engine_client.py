"""The requests and questions that are open in the engine process: sends them, and routes what comes back.

Knows no text and no gRPC. When the engine process ends, everything open fails at once.
"""

import asyncio
import contextlib
import itertools
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

import msgspec

from tgis.errors import EngineFailure, InvalidRequest, OutOfMemory, RequestError, Unavailable
from tgis.frontend.engine_process import EngineProcess
from tgis.frontend.output import Inbox, Output
from tgis.ipc import messages
from tgis.ipc.lookups import GrammarSpec, LookedUp, LookUp
from tgis.ipc.messages import BatchState
from tgis.ipc.request import Request

if TYPE_CHECKING:
    from tgis.frontend.metrics import Metrics

BATCH_STATE_TIMEOUT = 5.0


class EngineClient(EngineProcess):
    """One engine process and what is open in it."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics: Metrics | None = None  # needs to know the engine first
        self._open: dict[int, Output] = {}
        self.next_id = itertools.count(1).__next__  # of a request or a lookup
        self._cancelled: list[int] = []  # requests and lookups, in this iteration of the loop
        # The engine's answers; None if it has died.
        self._lookups: dict[int, asyncio.Future[LookedUp | None]] = {}
        self._batch_state: asyncio.Future[BatchState | None] | None = None

    def queued(self) -> list[Request]:
        """The open requests that have never been scheduled."""
        return [output.request for output in list(self._open.values()) if not output.timings.scheduled]

    def lora_adapters(self) -> tuple[set[str], set[str]]:
        """Ids of the LoRA adapters of running requests, and of those that only queued requests use."""
        running: set[str] = set()
        waiting: set[str] = set()
        for output in list(self._open.values()):
            if (adapter := output.request.adapter) and not adapter.length:
                (running if output.timings.scheduled else waiting).add(adapter.id)
        return running, waiting - running

    def seconds_stalled(self) -> float:
        """Seconds since the engine last made progress, while requests are open; else 0."""
        return self.watchdog.seconds_stalled(time.monotonic()) if self._open else 0.0

    async def batch_state(self) -> BatchState:
        """What runs and waits; Unavailable before the engine is ready, after its death, or if it hangs."""
        self._check_alive()
        if not self.ready.done():
            raise Unavailable("the model is still loading")
        if self._batch_state is None:  # one question for all who ask before its answer
            self._batch_state = asyncio.get_running_loop().create_future()
            self.send(messages.GetBatchState())
        answer = self._batch_state
        await asyncio.wait([answer], timeout=BATCH_STATE_TIMEOUT)
        if not answer.done():
            seconds = self.watchdog.seconds_stalled(time.monotonic())
            raise Unavailable(f"the engine is in a step that has taken {seconds:.0f} s by now, or it hangs")
        if (state := answer.result()) is None:
            raise Unavailable(self._death_cause)
        return msgspec.structs.replace(
            state, kv_cache_bytes=self.ready.result().kv_cache_bytes, resident_cache_bytes=self.resident_cache_bytes
        )

    async def look_up(self, target: str | GrammarSpec, timeout: float, kept: contextlib.ExitStack) -> LookedUp | None:
        """Have the engine process find something, and keep it as long as `kept`; None if that takes too long."""
        self._check_alive()
        lookup = LookUp(self.next_id(), target)
        answer = self._lookups[lookup.lookup_id] = asyncio.get_running_loop().create_future()
        self.send(lookup)
        kept.callback(self._let_go, lookup.lookup_id)
        await asyncio.wait([answer], timeout=timeout)
        self._check_alive()
        return answer.result() if answer.done() else None

    def _let_go(self, lookup_id: int) -> None:
        del self._lookups[lookup_id]
        self._cancel(lookup_id)

    @contextlib.contextmanager
    def submit(self, outputs: Sequence[Output], *, eager: bool) -> Iterator[Inbox]:
        """Queue the requests of one call; whatever is still open on leaving the block is cancelled."""
        self._check_alive()
        inbox = Inbox(outputs, eager=eager)
        if not self._open:
            self.watchdog.progress(time.monotonic())
        self._open |= {output.request.id: output for output in outputs}
        self.send(messages.Submit([output.request for output in outputs], time.monotonic()))
        try:
            yield inbox
        finally:
            for output in outputs:
                self.cancel(output)
            inbox.close()

    def cancel(self, output: Output) -> None:
        """Cancel the request unless it has ended."""
        if self._remove(output):
            self._cancel(output.request.id)

    def handle(self, message: messages.FromEngine) -> None:
        """Handle one message from the engine process."""
        match message:  # an engine that hangs in a step may still send what is not in the first three
            case messages.Step():
                self.watchdog.progress(time.monotonic())
                self._deliver(message)
            case messages.PromptLogprobs():
                self.watchdog.progress(time.monotonic())
                if output := self._open.get(message.id):
                    output.prompt_logprobs.append(message)
            case messages.Failed():
                self.watchdog.progress(time.monotonic())
                self._deliver_failure(message)
            case LookedUp():
                _answer(self._lookups.get(message.lookup_id), message)
            case BatchState():
                _answer(self._batch_state, message)
                self._batch_state = None
            case _:
                super().handle(message)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail everything open."""
        super().connection_lost(exc)
        _answer(self._batch_state, None)
        for lookup in self._lookups.values():
            _answer(lookup, None)
        for request_id in list(self._open):
            self._fail(request_id, Unavailable(self._death_cause))

    def _check_alive(self) -> None:
        if self._dead:
            raise Unavailable(self._death_cause)

    def _deliver(self, step: messages.Step) -> None:
        now = time.monotonic()
        for request_id, seconds in step.stats.first_scheduled.items() if step.stats else ():
            if output := self._open.get(request_id):
                output.timings.scheduled = output.timings.submitted + seconds
        num_discarded = 0
        all_logprobs = step.logprobs or [[]] * len(step.ids)
        latencies = defaultdict[float, int](int)  # few keys: most requests got their last tokens from the same step
        for request_id, tokens, logprobs, stop_reason in zip(
            step.ids, step.tokens, all_logprobs, step.stop_reasons, strict=True
        ):
            output = self._open.get(request_id)
            if output is None:  # cancelled meanwhile
                num_discarded += len(tokens)
                continue
            if tokens and output.timings.first_token:
                latencies[now - output.timings.last_token] += 1
            elif tokens and self.metrics:
                self.metrics.requests.time_to_first_token.observe(now - output.timings.arrived)
            output.put(tokens, logprobs, stop_reason, now)
            if stop_reason:
                self._remove(output)
        if self.metrics and step.stats:
            self.metrics.batches.discarded_tokens.inc(num_discarded)
            num_tokens = sum(map(len, step.tokens))
            self.metrics.step_succeeded(step.stats, num_tokens, time.monotonic() - now, latencies)
            self.metrics.batches.speculation.count_step_tokens(step.stats.counters, step.tokens)
            if not self._open:  # the step was in flight when the last request was cancelled
                self.metrics.last_step = None

    def _deliver_failure(self, failed: messages.Failed) -> None:
        for request_id in failed.ids:
            self._fail(request_id, _request_error(failed.kind, failed.message))
        if self.metrics and failed.prefill is not None:
            self.metrics.step_failed(failed.kind, prefill=failed.prefill)

    def _fail(self, request_id: int, error: RequestError) -> None:
        if output := self._open.get(request_id):
            self._remove(output)
            output.fail(error)

    def _remove(self, output: Output) -> bool:
        """Forget an open request; return whether it was one."""
        known = self._open.pop(output.request.id, None) is not None
        if known and not self._open and self.metrics:
            self.metrics.last_step = None
        return known

    def _cancel(self, request_id: int) -> None:
        """Cancel together with others of this iteration of the loop: each message takes a search of the queue."""
        if not self._cancelled:
            asyncio.get_running_loop().call_soon(self._send_cancelled)
        self._cancelled.append(request_id)

    def _send_cancelled(self) -> None:
        ids, self._cancelled = self._cancelled, []
        if not self._dead:
            self.send(messages.Cancel(ids))


Answer = TypeVar("Answer")


def _answer(question: "asyncio.Future[Answer] | None", answer: Answer) -> None:
    """Answer whoever still waits."""
    if question is not None and not question.done():
        question.set_result(answer)


def _request_error(kind: messages.FailureKind, text: str) -> RequestError:
    match kind:
        case messages.FailureKind.OUT_OF_MEMORY:
            return OutOfMemory(text)
        case messages.FailureKind.GRAMMAR:
            said = "the grammar cannot be followed"
            return InvalidRequest("grammar", f"{said}: {text}", logged=said)
        case messages.FailureKind.NOTHING_LEFT:
            said = "allowed_token_ids, bad_words, stop_token_ids and the grammar leave no token that may come next"
            return InvalidRequest(text, f"{said}, or the model's scores are not finite")
        case messages.FailureKind.ERROR:
            return EngineFailure(f"Request failed during generation: {text}")
