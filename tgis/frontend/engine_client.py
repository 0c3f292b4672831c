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
from tgis.frontend.engine_queries import Inspection
from tgis.frontend.output_queue import Inbox, TokenEvent
from tgis.frontend.prompt_lookups import PromptLookups
from tgis.ipc.adapters import PromptInfo
from tgis.ipc.messages import (
    Cancel,
    EngineInfo,
    EngineOptions,
    Failed,
    FailureKind,
    Fatal,
    FrameReader,
    FromEngine,
    Inspect,
    Ready,
    Request,
    Shutdown,
    Step,
    StepStats,
    StopReason,
    Submit,
    ToEngine,
    pack,
)
from tgis.ipc.snapshot import Snapshot

log = logging.getLogger(__name__)

_EXIT_SECONDS = 5.0
_ENDED = "the engine process has ended"


class StepObserver(Protocol):
    """Who is told about steps; the metrics."""

    def step(self, stats: StepStats, processing: float) -> None:
        """A step has succeeded; `processing` is the seconds that its tokens took here."""

    def queued(self, new: int) -> None:
        """So many requests wait that have never been in a step."""

    def step_failed(self, kind: FailureKind, *, prefill: bool) -> None:
        """A step has failed as a whole."""

    def idle(self) -> None:
        """No request is open."""


class EngineClient:
    """One engine process and the requests that are open in it."""

    def __init__(self) -> None:
        self.observer: StepObserver | None = None
        self._open: dict[int, Inbox] = {}
        self._queued = 0  # open requests that have not been in any step yet
        self._queued_tokens = 0  # of their inputs
        self._next_id = 0
        self._last_progress = time.monotonic()
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[EngineInfo] = loop.create_future()
        self.died: asyncio.Future[str] = loop.create_future()  # its result says why
        self._inspection = Inspection(lambda: self._send(Inspect()))
        self._lookups = PromptLookups(self._send)
        self._cause = ""
        self._gone = False
        self._farewell: asyncio.Future[None] | None = None
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
        self._transport, _ = await loop.create_unix_connection(lambda: _Link(self), sock=ours)
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

    async def inspect(self) -> Snapshot:
        """What runs and waits; Unavailable while nobody can say."""
        if self._gone or not self.ready.done():
            raise Unavailable(self._cause or "the model is still loading")
        return await self._inspection.snapshot()

    def stalled_for(self) -> float:
        """Seconds since the engine last said anything, while something is open; else 0."""
        return time.monotonic() - self._last_progress if self._open else 0.0

    def next_id(self) -> int:
        """A request id that nobody has had."""
        self._next_id += 1
        return self._next_id

    def prompt(self, prompt_id: str) -> contextlib.AbstractAsyncContextManager[PromptInfo | None]:
        """A block in which what the id names stays as it was found; None if that takes too long."""
        if self._gone:
            raise Unavailable(self._cause)
        return self._lookups.found(self.next_id(), prompt_id)

    @contextlib.contextmanager
    def submitted(self, requests: list[Request], *, eager: bool) -> Iterator[list[Inbox]]:
        """Queue the inputs of one call; whatever is still open on leaving the block is cancelled."""
        if self._gone:
            raise Unavailable(self._cause)
        inboxes = [Inbox(request, eager=eager) for request in requests]
        if not self._open:
            self._last_progress = time.monotonic()
        self._open.update((inbox.request.id, inbox) for inbox in inboxes)
        self._count_queued(len(requests), sum(len(request.tokens) for request in requests))
        self._send(Submit(requests, time.monotonic()))
        try:
            yield inboxes
        finally:
            for inbox in inboxes:
                self.close(inbox)

    def close(self, inbox: Inbox) -> None:
        """Nobody waits for this request any more: cancel it unless it has ended."""
        if self._forget(inbox) and not self._gone:
            self._send(Cancel([inbox.request.id]))

    def give_up(self, cause: str) -> None:
        """End an engine process that makes no progress."""
        assert self._process is not None
        self._cause = self._cause or cause
        if self._process.returncode is None:
            self._process.kill()

    async def stop(self) -> None:
        """Tell the engine process to leave, and see to it that it does."""
        if self._process is None:
            return
        if not self._gone:
            self._send(Shutdown())
        try:
            await asyncio.wait_for(self._process.wait(), _EXIT_SECONDS)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        if self._transport is not None:
            self._transport.close()

    def receive(self, message: FromEngine) -> None:
        """Act on one message of the engine."""
        if not isinstance(message, Snapshot | PromptInfo):  # an engine that only talks is stuck
            self._last_progress = time.monotonic()
        match message:
            case Snapshot():
                self._inspection.answer(message)
            case PromptInfo():
                self._lookups.answer(message)
            case Step():
                self._deliver(message)
            case Failed(ids, kind, text, prefill):
                for request_id in ids:
                    self._end(request_id, _error_of(kind, text))
                if self.observer and prefill is not None:
                    self.observer.step_failed(kind, prefill=prefill)
            case Ready(info):
                self.ready.set_result(info)
            case Fatal(text):
                self._cause = text

    def lost(self) -> None:
        """The engine process is gone: fail what is open, then find out why."""
        self._gone = True
        self._cause = self._cause or _ENDED
        self._inspection.end(self._cause)
        self._lookups.end(self._cause)
        for request_id in list(self._open):
            self._end(request_id, Unavailable(self._cause))
        self._farewell = asyncio.ensure_future(self._report_death())

    async def _report_death(self) -> None:
        assert self._process is not None
        with contextlib.suppress(TimeoutError):
            code = await asyncio.wait_for(self._process.wait(), _EXIT_SECONDS)
            if self._cause == _ENDED:
                self._cause = _describe_exit(code)
        self.died.set_result(self._cause)

    def _deliver(self, step: Step) -> None:
        started = time.monotonic()
        facts = step.facts or [None] * len(step.ids)
        for request_id, inputs in step.inputs.items():
            if inbox := self._open.get(request_id):
                inbox.input_facts = inputs
        if step.stats is not None:
            self._note_joined(step.stats)
        for request_id, token, end, fact in zip(step.ids, step.tokens, step.ends, facts, strict=True):
            if inbox := self._open.get(request_id):  # else cancelled meanwhile
                inbox.put(TokenEvent(token, StopReason(end), fact))
                if end:
                    self._forget(inbox)
        if self.observer and step.stats:
            self.observer.step(step.stats, time.monotonic() - started)
            if not self._open:  # the step was on its way when the last row was cancelled
                self.observer.idle()

    def _note_joined(self, stats: StepStats) -> None:
        joined = time.monotonic() - stats.duration
        for request_id in stats.joined:
            if inbox := self._open.get(request_id):
                inbox.times.joined = joined
                self._count_queued(-1, -len(inbox.request.tokens))

    def _end(self, request_id: int, error: RequestError) -> None:
        if inbox := self._open.get(request_id):
            self._forget(inbox)
            inbox.fail(error)

    def _forget(self, inbox: Inbox) -> bool:
        """Take it out of the open requests; whether it was one."""
        known = self._open.pop(inbox.request.id, None) is not None
        if known and not inbox.times.joined:
            self._count_queued(-1, -len(inbox.request.tokens))
        if known and not self._open and self.observer:
            self.observer.idle()
        return known

    def _count_queued(self, inputs: int, tokens: int) -> None:
        self._queued += inputs
        self._queued_tokens += tokens
        if self.observer:
            self.observer.queued(self._queued)

    def _send(self, message: ToEngine) -> None:
        assert self._transport is not None
        self._transport.write(pack(message))


class _Link(asyncio.Protocol):
    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._reader = FrameReader(FromEngine)

    def data_received(self, data: bytes) -> None:
        for message in self._reader.feed(data):
            self._client.receive(message)

    def connection_lost(self, _exc: Exception | None) -> None:
        self._client.lost()


def _error_of(kind: FailureKind, text: str) -> RequestError:
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
