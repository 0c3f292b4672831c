"""The front end's side of the engine process: spawns it, sends it requests, routes its output to the open calls.

Knows no text and no gRPC. The engine's death is end-of-file on the socket: every open request fails at once.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, assert_never

from tgis.errors import EngineFailure, InvalidRequest, OutOfMemory, RequestError, Unavailable
from tgis.frontend.engine_queries import Lookups, SnapshotQuery
from tgis.frontend.engine_watchdog import EngineWatchdog
from tgis.frontend.output_queue import OutputQueue, RequestTimings
from tgis.ipc import messages
from tgis.ipc.adapters import AdapterResolved, ResolveAdapter
from tgis.ipc.framing import FrameReader, encode_frame
from tgis.ipc.grammars import CompileGrammar, GrammarCompiled, GrammarSpec, Vocabulary
from tgis.ipc.request import Request
from tgis.ipc.snapshot import Snapshot

if TYPE_CHECKING:
    from tgis.frontend.metrics import Metrics

_EXIT_TIMEOUT = 5.0
_ADAPTER_TIMEOUT = 5.0
_DIED = "the engine process has ended"
_STOPPED = "the server has stopped"
_NO_PROGRESS = messages.Heartbeat | Snapshot | AdapterResolved | GrammarCompiled  # a stuck engine sends these, too


class EngineClient:
    """One engine process and the requests that are open in it."""

    def __init__(self) -> None:
        self.metrics: Metrics | None = None  # needs to know the engine first
        self.fallback_reason = ""  # why it is not the engine asked for
        self._queues: dict[int, OutputQueue] = {}
        self._num_queued = 0  # open requests that have never been scheduled
        self._queued_tokens = 0  # of their inputs
        self._next_id = 0
        self._watchdog = EngineWatchdog(time.monotonic())
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[messages.EngineInfo] = loop.create_future()
        self.died: asyncio.Future[str] = loop.create_future()  # its result says why
        self._cancelled: list[int] = []  # requests and lookups, in this iteration of the loop
        self._snapshot_query = SnapshotQuery(lambda: self._send(messages.GetSnapshot()))
        self._lookups = Lookups(self._send, self._cancel)
        self._dropped_log_lines: dict[int, int] = {}  # by rank
        self._death_cause = ""
        self._dead = False
        self._death_task: asyncio.Future[None] | None = None
        self._transport: asyncio.Transport | None = None
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, options: messages.EngineOptions) -> int:
        """Spawn the engine process and return its id; then `ready` or `died` gets a result."""
        ours, theirs = socket.socketpair()
        with theirs:
            fd = theirs.fileno()
            command = (sys.executable, "-m", "tgis.engine_core.main", str(fd))
            # In a session of its own it gets no Ctrl-C; uvloop has no `process_group`.
            self._process = await asyncio.create_subprocess_exec(*command, pass_fds=(fd,), start_new_session=True)
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_unix_connection(lambda: _EngineProtocol(self), sock=ours)
        self._send(options)
        return self._process.pid

    def send_vocabulary(self, vocabulary: Vocabulary) -> None:
        """Once, after the start; the engine is not ready before."""
        self._send(vocabulary)

    @property
    def queued_tokens(self) -> int:
        """Input tokens of the open requests that have never been scheduled."""
        return self._queued_tokens

    def lora_adapters(self) -> tuple[set[str], set[str]]:
        """Ids of the LoRA adapters of running requests, and of those that only queued requests use."""
        running: set[str] = set()
        waiting: set[str] = set()
        for queue in self._queues.values():
            if (adapter := queue.request.adapter) and not adapter.length:
                (running if queue.timings.scheduled else waiting).add(adapter.id)
        return running, waiting - running

    async def snapshot(self) -> Snapshot:
        """What runs and waits; Unavailable before the engine is ready, after its death, or if it hangs."""
        if self._dead or not self.ready.done():
            raise Unavailable(self._death_cause or "the model is still loading")
        return await self._snapshot_query.get()

    @property
    def num_dropped_log_lines(self) -> int:
        """Of all processes of the engine."""
        return sum(self._dropped_log_lines.values())

    def tick(self) -> float:
        """Call every TICK_SECONDS; return by how many seconds this process is late."""
        return self._watchdog.tick(time.monotonic())

    def seconds_stalled(self) -> float:
        """Seconds since the engine last made progress, while requests are open; else 0."""
        return self._watchdog.seconds_stalled(time.monotonic()) if self._queues else 0.0

    def silence(self) -> str | None:
        """Which process of the engine has stopped sending heartbeats, and for how long."""
        return self._watchdog.silence(time.monotonic())

    def next_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def acquire_adapter(self, adapter_id: str) -> contextlib.AbstractAsyncContextManager[AdapterResolved | None]:
        """Look an adapter up and keep it until the block is left; None if that takes too long."""
        if self._dead:
            raise Unavailable(self._death_cause)
        return self._lookups.acquire(ResolveAdapter(self.next_id(), adapter_id), AdapterResolved, _ADAPTER_TIMEOUT)

    def acquire_grammar(
        self, spec: GrammarSpec, timeout: float
    ) -> contextlib.AbstractAsyncContextManager[GrammarCompiled | None]:
        """Compile a grammar and keep it until the block is left; None if that takes too long."""
        if self._dead:
            raise Unavailable(self._death_cause)
        return self._lookups.acquire(CompileGrammar(self.next_id(), spec), GrammarCompiled, timeout)

    @contextlib.contextmanager
    def submit(self, requests: list[Request], *, eager: bool, arrived: float) -> Iterator[list[OutputQueue]]:
        """Queue the inputs of one call; whatever is still open on leaving the block is cancelled."""
        if self._dead:
            raise Unavailable(self._death_cause)
        queues = [OutputQueue(request, eager=eager, arrived=arrived) for request in requests]
        if not self._queues:
            self._watchdog.progress(time.monotonic())
        self._queues.update((queue.request.id, queue) for queue in queues)
        self._count_queued(len(requests), sum(len(request.tokens) for request in requests))
        self._send(messages.Submit(requests, time.monotonic()))
        try:
            yield queues
        finally:
            for queue in queues:
                self.close(queue)

    def close(self, queue: OutputQueue) -> None:
        """Cancel the request unless it has ended."""
        queue.close()
        if self._remove(queue):
            self._cancel(queue.request.id)

    def kill(self, cause: str) -> None:
        """Kill the engine process, if it has not ended."""
        assert self._process is not None
        self._death_cause = self._death_cause or cause
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and asyncio is about to say so
                os.killpg(self._process.pid, signal.SIGKILL)  # compilers that it has started as well

    async def stop(self) -> None:
        """Shut the engine process down and wait for its exit; kill it after a timeout."""
        if self._process is None:
            return
        if not self.ready.done():
            self.kill(_STOPPED)  # modules that it imports may not let it notice anything for seconds
        elif not self._dead:
            self._send(messages.Shutdown())
        try:
            await asyncio.wait_for(self._process.wait(), _EXIT_TIMEOUT)
        except TimeoutError:
            self.kill(_STOPPED)
            await self._process.wait()
        if self._transport is not None:
            self._transport.close()

    def handle(self, message: messages.FromEngine) -> None:
        """Handle one message from the engine process."""
        if not isinstance(message, _NO_PROGRESS):
            self._watchdog.progress(time.monotonic())
        match message:
            case messages.Heartbeat(rank, num_dropped):
                self._watchdog.heartbeat(rank, time.monotonic())
                self._dropped_log_lines[rank] = num_dropped
            case Snapshot():
                self._snapshot_query.resolve(message)
            case AdapterResolved() | GrammarCompiled():
                self._lookups.resolve(message)
            case messages.PromptLogprobs():
                self._deliver_prompt_logprobs(message)
            case messages.Step():
                self._deliver(message)
            case messages.Failed():
                self._deliver_failure(message)
            case messages.Ready(info, reason):
                self.fallback_reason = reason
                self.ready.set_result(info)
            case messages.Fatal(text):
                self._death_cause = text
            case unknown:
                assert_never(unknown)

    def disconnected(self) -> None:
        """The engine process is gone: fail everything open, then find out why."""
        self._dead = True
        self._death_cause = self._death_cause or _DIED
        self._snapshot_query.fail(self._death_cause)
        self._lookups.fail(self._death_cause)
        for request_id in list(self._queues):
            self._fail(request_id, Unavailable(self._death_cause))
        self._death_task = asyncio.ensure_future(self._report_death())

    async def _report_death(self) -> None:
        assert self._process is not None
        with contextlib.suppress(TimeoutError):
            code = await asyncio.wait_for(self._process.wait(), _EXIT_TIMEOUT)
            if self._death_cause == _DIED:
                self._death_cause = _describe_exit(code)
        self.died.set_result(self._death_cause)

    def _deliver(self, step: messages.Step) -> None:
        now = time.monotonic()
        if step.stats is not None:
            self._record_scheduled(step.stats)
        num_discarded = 0
        all_logprobs = step.logprobs or [[]] * len(step.ids)
        latencies: dict[float, int] = {}  # few values: most requests got their last tokens from the same step
        for request_id, tokens, logprobs, stop_reason in zip(
            step.ids, step.tokens, all_logprobs, step.stop_reasons, strict=True
        ):
            if queue := self._queues.get(request_id):
                if tokens:
                    self._record_tokens(queue.timings, latencies, now)
                queue.timings.last_token = now
                queue.put(tokens, logprobs, stop_reason)
                if stop_reason:
                    self._remove(queue)
            else:  # cancelled meanwhile
                num_discarded += len(tokens)
        if self.metrics and step.stats:
            self.metrics.inter_token_latencies(latencies)
            self.metrics.tokens_discarded(num_discarded)
            self.metrics.step_succeeded(step.stats, sum(map(len, step.tokens)), time.monotonic() - now)
            if not self._queues:  # the step was in flight when the last request was cancelled
                self.metrics.engine_idle()

    def _deliver_failure(self, failed: messages.Failed) -> None:
        for request_id in failed.ids:
            self._fail(request_id, _request_error(failed.kind, failed.message))
        if self.metrics and failed.prefill is not None:
            self.metrics.step_failed(failed.kind, prefill=failed.prefill)

    def _deliver_prompt_logprobs(self, logprobs: messages.PromptLogprobs) -> None:
        if queue := self._queues.get(logprobs.id):
            queue.prompt_logprobs.append(logprobs)

    def _record_scheduled(self, stats: messages.StepStats) -> None:
        for request_id, seconds in zip(stats.first_scheduled, stats.queue_durations, strict=True):
            if queue := self._queues.get(request_id):
                queue.timings.scheduled = queue.timings.submitted + seconds
                self._count_queued(-1, -len(queue.request.tokens))

    def _record_tokens(self, timings: RequestTimings, latencies: dict[float, int], now: float) -> None:
        if timings.first_token:
            latency = now - timings.last_token
            latencies[latency] = latencies.get(latency, 0) + 1
            return
        timings.first_token = now
        if self.metrics:
            self.metrics.first_token(now - timings.arrived)

    def _fail(self, request_id: int, error: RequestError) -> None:
        if queue := self._queues.get(request_id):
            self._remove(queue)
            queue.fail(error)

    def _remove(self, queue: OutputQueue) -> bool:
        """Forget an open request; return whether it was one."""
        known = self._queues.pop(queue.request.id, None) is not None
        if known and not queue.timings.scheduled:
            self._count_queued(-1, -len(queue.request.tokens))
        if known and not self._queues and self.metrics:
            self.metrics.engine_idle()
        return known

    def _count_queued(self, inputs: int, tokens: int) -> None:
        self._num_queued += inputs
        self._queued_tokens += tokens
        if self.metrics:
            self.metrics.set_queued(self._num_queued)

    def _cancel(self, request_id: int) -> None:
        """Together with others of this iteration of the loop: clients may vanish together."""
        if not self._cancelled:
            asyncio.get_running_loop().call_soon(self._send_cancelled)
        self._cancelled.append(request_id)

    def _send_cancelled(self) -> None:
        ids, self._cancelled = self._cancelled, []
        if not self._dead:
            self._send(messages.Cancel(ids))

    def _send(self, message: messages.ToEngine) -> None:
        assert self._transport is not None
        self._transport.write(encode_frame(message))


class _EngineProtocol(asyncio.Protocol):
    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._reader = FrameReader(messages.FromEngine)

    def data_received(self, data: bytes) -> None:
        for message in self._reader.feed(data):
            self._client.handle(message)

    def connection_lost(self, _exc: Exception | None) -> None:
        self._client.disconnected()


def _request_error(kind: messages.FailureKind, text: str) -> RequestError:
    match kind:
        case messages.FailureKind.OUT_OF_MEMORY:
            return OutOfMemory(text)
        case messages.FailureKind.GRAMMAR:
            said = "the grammar cannot be followed"
            return InvalidRequest("grammar", f"{said}: {text}", logged=said)
        case messages.FailureKind.ERROR:
            return EngineFailure(f"Request failed during generation: {text}")


def _describe_exit(code: int) -> str:
    if code < 0:
        hint = " (out of memory?)" if code == -9 else ""
        return f"the engine process was ended by signal {-code}{hint}"
    return f"the engine process ended with exit code {code}"
