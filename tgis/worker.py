"""Main of the engine process: read messages, plan, step, commit, send; owns the batcher and the engine.

Run as `python -m tgis.worker FD` with one end of a socketpair. It leaves when told to, when its front end is gone
(end of file), or when it cannot go on, and then says why first. SIGINT and SIGTERM are the front end's business.
"""

import gc
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time

from tgis import logs
from tgis.batcher.batcher import Batcher
from tgis.batcher.sequence import Plan, Sequence
from tgis.batcher.weights import Limits
from tgis.engines import load_engine
from tgis.engines.base import Engine, StepResult
from tgis.errors import OutOfMemory, TgisError
from tgis.messages import (
    Cancel,
    EngineOptions,
    Failed,
    FailureKind,
    Fatal,
    FrameReader,
    FromEngine,
    Ready,
    Shutdown,
    Step,
    StepStats,
    Submit,
    ToEngine,
    pack,
)

log = logging.getLogger(__name__)

_CHUNK = 1 << 18


class Link:
    """The socket to the front end. A thread reads it, so that its end of file is noticed during a long step."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True, name="link").start()

    def receive(self, *, wait: bool) -> list[ToEngine]:
        """The messages that have arrived; with `wait`, at least one."""
        messages = [self._inbox.get()] if wait else []
        while not self._inbox.empty():
            messages.append(self._inbox.get())
        return messages

    def send(self, message: FromEngine) -> None:
        """Send one message; the front end always reads."""
        self._socket.sendall(pack(message))

    def _read(self) -> None:
        reader = FrameReader(ToEngine)
        try:
            while data := self._socket.recv(_CHUNK):
                for message in reader.feed(data):
                    self._inbox.put(message)
        except OSError:
            log.debug("the link broke", exc_info=True)
        os._exit(0)  # the front end is gone: nobody is left to serve or to tell


class Worker:
    """The loop of the engine process."""

    def __init__(self, link: Link, engine: Engine, batcher: Batcher) -> None:
        self._link = link
        self._engine = engine
        self._batcher = batcher

    def run(self) -> None:
        """Serve until Shutdown."""
        while self._handle(self._link.receive(wait=self._batcher.idle)):
            expired = self._batcher.expire(time.monotonic())
            if expired:
                self._send_step(expired, [-1] * len(expired))
            plan = self._batcher.plan()
            if plan is not None:
                self._step(plan)

    def _handle(self, messages: list[ToEngine]) -> bool:
        for message in messages:
            match message:
                case Submit(requests):
                    self._batcher.submit(requests, time.monotonic())
                case Cancel(ids):
                    self._engine.release(self._batcher.cancel(ids))
                case Shutdown():
                    return False
                case _:
                    raise AssertionError(f"unexpected {type(message).__name__}")
        return True

    def _step(self, plan: Plan) -> None:
        started = time.monotonic()
        try:
            result = self._engine.step(plan)
        except OutOfMemory as error:
            self._fail(plan.rows, FailureKind.OUT_OF_MEMORY, str(error), prefill=plan.prefill)
        except Exception as error:
            log.exception("a step of %d rows failed", len(plan.rows))
            self._fail(plan.rows, FailureKind.ERROR, f"{type(error).__name__}: {error}", prefill=plan.prefill)
        else:
            self._commit(plan, result, started, time.monotonic())

    def _commit(self, plan: Plan, result: StepResult, started: float, computed: float) -> None:
        if result.failed:
            plan, result = self._without_failed(plan, result)
        tokens = sum(row.pending for row in plan.rows) if plan.prefill else sum(len(r.tokens) for r in plan.rows)
        ended = self._batcher.commit(plan, result.tokens, computed)
        self._engine.release(ended)
        stats = StepStats(
            prefill=plan.prefill,
            rows=len(plan.rows),
            tokens=tokens,
            duration=time.monotonic() - started,
            forward=computed - started,
            running=self._batcher.running,
            waiting=self._batcher.waiting,
            remaining=self._batcher.remaining,
            queued_for=[started - row.queued_at for row in plan.rows] if plan.prefill else [],
        )
        self._send_step(plan.rows, result.tokens, result, stats)

    def _without_failed(self, plan: Plan, result: StepResult) -> tuple[Plan, StepResult]:
        for row in plan.rows:
            if row.id in result.failed:
                self._fail([row], FailureKind.ERROR, result.failed[row.id])
        kept = [i for i, row in enumerate(plan.rows) if row.id not in result.failed]
        facts = [result.facts[i] for i in kept] if result.facts else []
        survivors = Plan([plan.rows[i] for i in kept], plan.prefill)
        return survivors, StepResult([result.tokens[i] for i in kept], facts, result.inputs)

    def _send_step(
        self,
        rows: list[Sequence],
        tokens: list[int],
        result: StepResult | None = None,
        stats: StepStats | None = None,
    ) -> None:
        self._link.send(
            Step(
                ids=[row.id for row in rows],
                tokens=tokens,
                ends=[row.end for row in rows],
                facts=result.facts if result else [],
                inputs=result.inputs if result else {},
                stats=stats,
            )
        )

    def _fail(self, rows: list[Sequence], kind: FailureKind, message: str, *, prefill: bool | None = None) -> None:
        self._engine.release(rows)
        self._batcher.abandon(rows)
        self._link.send(Failed([row.id for row in rows], kind, message, prefill))


def _limits(options: EngineOptions, engine: Engine) -> Limits:
    info = engine.info
    return Limits(
        max_batch_size=info.max_batch_size,
        weight=info.weight_limit,
        prefill_tokens=info.prefill_tokens,
        max_padding=options.max_prefill_padding,
        padded=info.padded,
    )


def _serve(link: Link, options: EngineOptions) -> None:
    engine = load_engine(options)
    engine.warm_up()
    batcher = Batcher(_limits(options, engine), options.eos_ids)
    gc.freeze()  # what has been loaded stays: the collector need not look at it again
    link.send(Ready(engine.info))
    Worker(link, engine, batcher).run()
    engine.close()


def main() -> int:
    """Load the engine that the first message names, and serve."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    link = Link(socket.socket(fileno=int(sys.argv[1])))
    first = link.receive(wait=True)
    assert len(first) == 1
    assert isinstance(first[0], EngineOptions)
    logs.set_up(level=first[0].log_level, json_output=first[0].json_output, process="engine")
    try:
        _serve(link, first[0])
    except TgisError as error:
        link.send(Fatal(str(error)))
        return 1
    except Exception as error:
        log.exception("the engine process cannot go on")
        link.send(Fatal(f"{type(error).__name__}: {error}"))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
