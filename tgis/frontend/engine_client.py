"""The front end's side of the engine process: spawns it, sends it requests, hands its answers to their owners.

Knows no text and no gRPC. The engine's death is end-of-file on the socket: every open request fails at once.
"""

import asyncio
import contextlib
import logging
import socket
import sys
import time
from collections.abc import Iterator
from typing import Protocol

from tgis.errors import EngineFailure, OutOfMemory, RequestError, Unavailable
from tgis.frontend.engine_queries import AdapterQueries, SnapshotQuery
from tgis.frontend.output_queue import OutputQueue, TokenOutput
from tgis.ipc.adapters import AdapterResolved
from tgis.ipc.framing import FrameReader, encode_frame
from tgis.ipc.messages import (
    Cancel,
    EngineInfo,
    EngineOptions,
    Failed,
    FailureKind,
    Fatal,
    FromEngine,
    GetSnapshot,
    Ready,
    Shutdown,
    Step,
    StepStats,
    Submit,
    ToEngine,
)
from tgis.ipc.request import Request, StopReason, TokenLogprobs
from tgis.ipc.snapshot import Snapshot

log = logging.getLogger(__name__)

_EXIT_TIMEOUT = 5.0
_DIED = "the engine process has ended"


class StepObserver(Protocol):
    """Who is told about steps; the metrics."""

    def step_succeeded(self, stats: StepStats, processing: float) -> None:
        """A step has succeeded; `processing` is the seconds that its tokens took here."""

    def set_queued(self, new: int) -> None:
        """So many requests wait that have never been in a step."""

    def step_failed(self, kind: FailureKind, *, prefill: bool) -> None:
        """A step has failed as a whole."""

    def engine_idle(self) -> None:
        """No request is open."""


class EngineClient:
    """One engine process and the requests that are open in it."""

    def __init__(self) -> None:
        self.observer: StepObserver | None = None
        self._queues: dict[int, OutputQueue] = {}
        self._num_queued = 0  # open requests that have not been in any step yet
        self._queued_tokens = 0  # of their inputs
        self._next_id = 0
        self._last_progress = time.monotonic()
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[EngineInfo] = loop.create_future()
        self.died: asyncio.Future[str] = loop.create_future()  # its result says why
        self._snapshot_query = SnapshotQuery(lambda: self._send(GetSnapshot()))
        self._adapter_queries = AdapterQueries(self._send)
        self._death_cause = ""
        self._dead = False
        self._death_task: asyncio.Future[None] | None = None
        self._transport: asyncio.Transport | None = None
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, options: EngineOptions) -> None:
        """Spawn the engine process; `ready` or `died` will tell how it went."""
        ours, theirs = socket.socketpair()
        with theirs:
            fd = theirs.fileno()
            command = (sys.executable, "-m", "tgis.engine_core.main", str(fd))
            self._process = await asyncio.create_subprocess_exec(*command, pass_fds=(fd,))
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_unix_connection(lambda: _EngineProtocol(self), sock=ours)
        self._send(options)

    @property
    def pid(self) -> int:
        """The engine process."""
        assert self._process is not None
        return self._process.pid

    @property
    def queued_tokens(self) -> int:
        """Input tokens of the open requests that have not been in any step yet."""
        return self._queued_tokens

    async def snapshot(self) -> Snapshot:
        """What runs and waits; Unavailable while nobody can say."""
        if self._dead or not self.ready.done():
            raise Unavailable(self._death_cause or "the model is still loading")
        return await self._snapshot_query.get()

    def seconds_stalled(self) -> float:
        """Seconds since the engine last said anything, while something is open; else 0."""
        return time.monotonic() - self._last_progress if self._queues else 0.0

    def next_id(self) -> int:
        """A request id that nobody has had."""
        self._next_id += 1
        return self._next_id

    def acquire_adapter(self, adapter_id: str) -> contextlib.AbstractAsyncContextManager[AdapterResolved | None]:
        """A block in which what the id names stays as it was found; None if that takes too long."""
        if self._dead:
            raise Unavailable(self._death_cause)
        return self._adapter_queries.acquire(self.next_id(), adapter_id)

    @contextlib.contextmanager
    def submit(self, requests: list[Request], *, eager: bool) -> Iterator[list[OutputQueue]]:
        """Queue the inputs of one call; whatever is still open on leaving the block is cancelled."""
        if self._dead:
            raise Unavailable(self._death_cause)
        inboxes = [OutputQueue(request, eager=eager) for request in requests]
        if not self._queues:
            self._last_progress = time.monotonic()
        self._queues.update((inbox.request.id, inbox) for inbox in inboxes)
        self._count_queued(len(requests), sum(len(request.tokens) for request in requests))
        self._send(Submit(requests, time.monotonic()))
        try:
            yield inboxes
        finally:
            for inbox in inboxes:
                self.close(inbox)

    def close(self, inbox: OutputQueue) -> None:
        """Nobody waits for this request any more: cancel it unless it has ended."""
        if self._remove(inbox) and not self._dead:
            self._send(Cancel([inbox.request.id]))

    def kill(self, cause: str) -> None:
        """End an engine process that makes no progress."""
        assert self._process is not None
        self._death_cause = self._death_cause or cause
        if self._process.returncode is None:
            self._process.kill()

    async def stop(self) -> None:
        """Tell the engine process to leave, and see to it that it does."""
        if self._process is None:
            return
        if not self._dead:
            self._send(Shutdown())
        try:
            await asyncio.wait_for(self._process.wait(), _EXIT_TIMEOUT)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        if self._transport is not None:
            self._transport.close()

    def handle(self, message: FromEngine) -> None:
        """Act on one message of the engine."""
        if not isinstance(message, Snapshot | AdapterResolved):  # an engine that only talks is stuck
            self._last_progress = time.monotonic()
        match message:
            case Snapshot():
                self._snapshot_query.resolve(message)
            case AdapterResolved():
                self._adapter_queries.resolve(message)
            case Step():
                self._deliver(message)
            case Failed(ids, kind, text, prefill):
                for request_id in ids:
                    self._fail(request_id, _request_error(kind, text))
                if self.observer and prefill is not None:
                    self.observer.step_failed(kind, prefill=prefill)
            case Ready(info):
                self.ready.set_result(info)
            case Fatal(text):
                self._death_cause = text

    def disconnected(self) -> None:
        """The engine process is gone: fail what is open, then find out why."""
        self._dead = True
        self._death_cause = self._death_cause or _DIED
        self._snapshot_query.fail(self._death_cause)
        self._adapter_queries.fail(self._death_cause)
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

    def _deliver(self, step: Step) -> None:
        started = time.monotonic()
        logprobs = step.logprobs or [[]] * len(step.ids)
        for request_id, inputs in step.prompt_logprobs.items():
            if inbox := self._queues.get(request_id):
                inbox.prompt_logprobs = inputs
        if step.stats is not None:
            self._record_scheduled(step.stats)
        for request_id, tokens, end, details in zip(step.ids, step.tokens, step.stop_reasons, logprobs, strict=True):
            if inbox := self._queues.get(request_id):  # else cancelled meanwhile
                self._put(inbox, tokens, end, details)
        if self.observer and step.stats:
            self.observer.step_succeeded(step.stats, time.monotonic() - started)
            if not self._queues:  # the step was on its way when the last row was cancelled
                self.observer.engine_idle()

    def _put(self, inbox: OutputQueue, tokens: list[int], end: int, logprobs: list[TokenLogprobs]) -> None:
        *others, last = tokens or [-1]
        details = iter(logprobs)
        for token in others:
            inbox.put(TokenOutput(token, StopReason.NOT_FINISHED, next(details, None)))
        inbox.put(TokenOutput(last, StopReason(end), next(details, None)))
        if end:
            self._remove(inbox)

    def _record_scheduled(self, stats: StepStats) -> None:
        joined = time.monotonic() - stats.duration
        for request_id in stats.first_scheduled:
            if inbox := self._queues.get(request_id):
                inbox.timings.scheduled = joined
                self._count_queued(-1, -len(inbox.request.tokens))

    def _fail(self, request_id: int, error: RequestError) -> None:
        if inbox := self._queues.get(request_id):
            self._remove(inbox)
            inbox.fail(error)

    def _remove(self, inbox: OutputQueue) -> bool:
        """Take it out of the open requests; whether it was one."""
        known = self._queues.pop(inbox.request.id, None) is not None
        if known and not inbox.timings.scheduled:
            self._count_queued(-1, -len(inbox.request.tokens))
        if known and not self._queues and self.observer:
            self.observer.engine_idle()
        return known

    def _count_queued(self, inputs: int, tokens: int) -> None:
        self._num_queued += inputs
        self._queued_tokens += tokens
        if self.observer:
            self.observer.set_queued(self._num_queued)

    def _send(self, message: ToEngine) -> None:
        assert self._transport is not None
        self._transport.write(encode_frame(message))


class _EngineProtocol(asyncio.Protocol):
    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._reader = FrameReader(FromEngine)

    def data_received(self, data: bytes) -> None:
        for message in self._reader.feed(data):
            self._client.handle(message)

    def connection_lost(self, _exc: Exception | None) -> None:
        self._client.disconnected()


def _request_error(kind: FailureKind, text: str) -> RequestError:
    match kind:
        case FailureKind.OUT_OF_MEMORY:
            return OutOfMemory(text)
        case FailureKind.ERROR:
            return EngineFailure(f"Request failed during generation: {text}")


def _describe_exit(code: int) -> str:
    if code < 0:
        hint = " (out of memory?)" if code == -9 else ""
        return f"the engine process was ended by signal {-code}{hint}"
    return f"the engine process ended with exit code {code}"
