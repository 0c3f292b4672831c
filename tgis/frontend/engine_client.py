"""The requests and questions that are open in the engine process: sends them, and routes what comes back.

Knows no text and no gRPC. When the engine process ends, everything open fails at once.
"""

import asyncio
import contextlib
import itertools
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TypeVar

import msgspec

from tgis.errors import EngineFailure, InvalidRequest, OutOfMemory, RequestError, Unavailable
from tgis.frontend.engine_output import EngineOutput
from tgis.frontend.engine_process import EngineProcess
from tgis.frontend.metrics import Metrics
from tgis.ipc import messages
from tgis.ipc.lookups import Acquire, Acquired, GrammarSpec
from tgis.ipc.messages import BatchState
from tgis.ipc.request import Request

BATCH_STATE_TIMEOUT = 5.0


class EngineClient:
    """The requests, lookups and questions that are open in an engine process, once it is ready."""

    def __init__(self, process: EngineProcess, metrics: Metrics) -> None:
        self.process = process
        self._metrics = metrics
        process.listen(self.handle, self._fail_all)
        self._open: dict[int, EngineOutput] = {}
        self.next_id = itertools.count(1).__next__  # ids of requests and lookups
        self._cancelled: list[int] = []  # requests and lookups, in this iteration of the loop
        # The engine's answers; None if it has died.
        self._lookups: dict[int, asyncio.Future[Acquired | None]] = {}
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
        return self.process.watchdog.seconds_stalled(time.monotonic()) if self._open else 0.0

    async def batch_state(self) -> BatchState:
        """What runs and waits; Unavailable after the death of the engine, or if it hangs."""
        self.process.check_alive()
        if self._batch_state is None:  # one question for all who ask before its answer
            self._batch_state = asyncio.get_running_loop().create_future()
            self.process.send(messages.GetBatchState())
        answer = self._batch_state
        await asyncio.wait([answer], timeout=BATCH_STATE_TIMEOUT)
        if not answer.done():
            seconds = self.process.watchdog.seconds_stalled(time.monotonic())
            raise Unavailable(f"the engine is in a step that has taken {seconds:.0f} s by now, or it hangs")
        self.process.check_alive()
        state = answer.result()
        assert state is not None
        process = self.process
        cache_bytes = process.ready.result().kv_cache_bytes
        return msgspec.structs.replace(
            state, kv_cache_bytes=cache_bytes, resident_cache_bytes=process.resident_cache_bytes
        )

    def flush_cache(self) -> None:
        """Let no later request find a prefix that is cached now; Unavailable after the death of the engine."""
        self.process.check_alive()
        self.process.send(messages.FlushCache())

    async def acquire(
        self, target: str | GrammarSpec, timeout: float, resources: contextlib.ExitStack
    ) -> Acquired | None:
        """Ask for an adapter or a grammar, held until `resources` closes; None if there is no answer in time."""
        self.process.check_alive()
        lookup = Acquire(self.next_id(), target)
        answer = self._lookups[lookup.lookup_id] = asyncio.get_running_loop().create_future()
        self.process.send(lookup)
        resources.callback(self._release, lookup.lookup_id)
        await asyncio.wait([answer], timeout=timeout)
        self.process.check_alive()
        return answer.result() if answer.done() else None

    def _release(self, lookup_id: int) -> None:
        del self._lookups[lookup_id]
        self._cancel(lookup_id)

    @contextlib.contextmanager
    def submit(self, outputs: Sequence[EngineOutput]) -> Iterator[None]:
        """Queue the requests of one call; whatever is still open on leaving the block is cancelled."""
        self.process.check_alive()
        if not self._open:
            self.process.watchdog.progress(time.monotonic())
        self._open |= {output.request.id: output for output in outputs}
        self.process.send(messages.Submit([output.request for output in outputs], time.monotonic()))
        try:
            yield
        finally:
            for output in outputs:
                self.cancel(output)

    def cancel(self, output: EngineOutput) -> None:
        """Cancel the request unless it has ended."""
        if self._remove(output):
            self._cancel(output.request.id)

    def handle(self, message: messages.FromEngine) -> None:
        """Handle one message from the engine process."""
        match message:  # an engine that hangs in a step may still send what is not in the first three
            case messages.Step():
                self.process.watchdog.progress(time.monotonic())
                self._deliver(message)
            case messages.PromptLogprobs():
                self.process.watchdog.progress(time.monotonic())
                if output := self._open.get(message.id):
                    output.prompt_logprobs.append(message)
            case messages.Failed():
                self.process.watchdog.progress(time.monotonic())
                self._deliver_failure(message)
            case Acquired():
                _answer(self._lookups.get(message.lookup_id), message)
            case BatchState():
                _answer(self._batch_state, message)
                self._batch_state = None

    def _fail_all(self) -> None:
        """The engine process has ended: fail everything open."""
        _answer(self._batch_state, None)
        for lookup in self._lookups.values():
            _answer(lookup, None)
        for request_id in list(self._open):
            self._fail(request_id, Unavailable(self.process.death_cause))

    def _deliver(self, step: messages.Step) -> None:
        now = time.monotonic()
        for request_id, (seconds, cached) in step.stats.first_scheduled.items() if step.stats else ():
            if output := self._open.get(request_id):
                output.timings.scheduled = output.timings.submitted + seconds
                output.num_cached_tokens = max(cached - output.request.soft_prompt_length, 0)
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
            elif tokens:
                self._metrics.requests.time_to_first_token.observe(now - output.timings.arrived)
            output.put(tokens, logprobs, stop_reason, now)
            if stop_reason:
                self._remove(output)
        if step.stats:
            self._metrics.batches.discarded_tokens.inc(num_discarded)
            self._metrics.step_succeeded(step.stats, step.tokens, time.monotonic() - now, latencies)
            if not self._open:  # the step was in flight when the last request was cancelled
                self._metrics.no_step_left()

    def _deliver_failure(self, failed: messages.Failed) -> None:
        for request_id in failed.ids:
            self._fail(request_id, _request_error(failed.kind, failed.message))
        if failed.prefill is not None:
            self._metrics.step_failed(failed.kind, prefill=failed.prefill)

    def _fail(self, request_id: int, error: RequestError) -> None:
        if output := self._open.get(request_id):
            self._remove(output)
            output.fail(error)

    def _remove(self, output: EngineOutput) -> bool:
        """Forget an open request; return whether it was one."""
        known = self._open.pop(output.request.id, None) is not None
        if known and not self._open:
            self._metrics.no_step_left()
        return known

    def _cancel(self, request_id: int) -> None:
        """Cancel together with others of this iteration of the loop: each message takes a search of the queue."""
        if not self._cancelled:
            asyncio.get_running_loop().call_soon(self._send_cancelled)
        self._cancelled.append(request_id)

    def _send_cancelled(self) -> None:
        ids, self._cancelled = self._cancelled, []
        if not self.process.dead:
            self.process.send(messages.Cancel(ids))


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
