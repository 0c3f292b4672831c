"""Main of the engine process: read messages, plan, step, commit, send; owns the batcher and the engine.

Run as `python -m tgis.engine_core.main FD` with one end of a socketpair. It exits when told to, when its front end is
gone (end of file), or on a fatal error, which it reports first. SIGINT and SIGTERM are left to the front end.
"""

import gc
import logging
import signal
import socket
import sys
import time

from tgis.batcher.batcher import Batcher
from tgis.batcher.memory_model import Limits, MemoryModel, check_longest
from tgis.batcher.sequence import Plan, Sequence
from tgis.batcher.step_stats import Report
from tgis.engines import load_engine
from tgis.engines.base import Engine, StepResult
from tgis.errors import OutOfMemory, StartError, TgisError
from tgis.ipc.adapters import LookupPrompt
from tgis.ipc.channel import Link
from tgis.ipc.messages import (
    Cancel,
    EngineInfo,
    EngineOptions,
    Failed,
    FailureKind,
    Fatal,
    Inspect,
    Ready,
    Request,
    Shutdown,
    Step,
    StepStats,
    Submit,
    ToEngine,
)
from tgis.prompts import open_store
from tgis.prompts.resolver import Lookups
from tgis.utils import logs

log = logging.getLogger(__name__)

_SHOWN_ROWS = 100  # in a snapshot, of those that run and of those that wait


class Worker:
    """The loop of the engine process."""

    def __init__(self, link: Link, engine: Engine, batcher: Batcher, lookups: Lookups | None = None) -> None:
        self._link = link
        self._lookups = lookups
        self._engine = engine
        self._padded = engine.info.padded
        self._batcher = batcher

    def run(self) -> None:
        """Serve until Shutdown."""
        while self._handle(self._link.receive(wait=self._batcher.idle)):
            expired = self._batcher.expire(time.monotonic())
            if expired:
                self._engine.release(expired)
                self._send_step(expired, [-1] * len(expired))
            plan = self._batcher.plan(time.monotonic())
            if plan is not None:
                self._step(plan)

    def _handle(self, messages: list[ToEngine]) -> bool:
        for message in messages:
            match message:
                case Submit(requests, at):
                    self._submit(requests, at)
                case Cancel(ids):
                    self._engine.release(self._batcher.cancel(ids))
                    if self._lookups:
                        self._lookups.cancel(ids)
                case Inspect():
                    self._link.send(self._batcher.snapshot(time.monotonic(), _SHOWN_ROWS))
                case Shutdown():
                    return False
                case _:
                    raise AssertionError(f"unexpected {type(message).__name__}")
        return True

    def _submit(self, requests: list[Request], at: float) -> None:
        for row in self._batcher.submit(requests, at):
            if row.request.prefix:
                assert self._lookups is not None
                row.prefix = self._lookups.prompt(row.request.prefix)

    def _step(self, plan: Plan) -> None:
        started = time.monotonic()
        self._engine.release(plan.preempted)
        try:
            result = self._engine.step(plan)
        except OutOfMemory as error:
            self._retreat(plan, FailureKind.OUT_OF_MEMORY, str(error))
        except StartError:
            raise  # the engine cannot go on
        except Exception as error:
            log.exception("a step of %d rows failed", len(plan.rows))
            self._retreat(plan, FailureKind.ERROR, f"{type(error).__name__}: {error}")
        else:
            self._commit(plan, result, started, time.monotonic())

    def _retreat(self, plan: Plan, kind: FailureKind, message: str) -> None:
        """Nobody got a token. The rows are tried again, but for those that failed alone."""
        self._engine.release(plan.rows)
        refused = self._batcher.retreat(plan, out_of_memory=kind is FailureKind.OUT_OF_MEMORY)
        log.warning("%d rows of a failed step (%s) are tried again", len(plan.rows) - len(refused), kind)
        self._link.send(Failed([row.id for row in refused], kind, message, plan.prefill))

    def _commit(self, plan: Plan, result: StepResult, started: float, computed: float) -> None:
        report = Report(plan, self._batcher, padded=self._padded, started=started)
        if result.failed:
            plan, result = self._without_failed(plan, result)
        ended = self._batcher.commit(plan, result.tokens, computed)
        self._engine.release(ended)
        self._send_step(plan.sampled, result.tokens, result, report.stats(computed, time.monotonic()))

    def _without_failed(self, plan: Plan, result: StepResult) -> tuple[Plan, StepResult]:
        """The step without the rows that the engine could not choose a token for; they get an error."""
        failed = [row for row in plan.rows if row.id in result.failed]
        self._engine.release(failed)
        self._batcher.abandon(failed)
        for row in failed:
            self._link.send(Failed([row.id], FailureKind.ERROR, result.failed[row.id]))
        kept = [i for i, row in enumerate(plan.sampled) if row not in failed]
        facts = [result.facts[i] for i in kept] if result.facts else []
        work = [(row, count) for row, count in zip(plan.rows, plan.counts, strict=True) if row not in failed]
        rows, counts = [row for row, _ in work], [count for _, count in work]
        survivors = Plan(rows, counts, [plan.sampled[i] for i in kept], plan.prefill)
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


def limits_of(options: EngineOptions, info: EngineInfo) -> Limits:
    """What bounds the batches of this engine."""
    return Limits(
        max_batch_size=info.max_batch_size,
        memory=MemoryModel(
            info.weight_limit,
            prefill_linear=info.prefill_linear,
            prefill_quadratic_0=info.prefill_linear,
            prefill_quadratic_1=info.prefill_quadratic,
        ),
        prefill_tokens=info.prefill_tokens,
        max_padding=options.max_prefill_padding,
        padded=info.padded,
        block_size=info.block_size,
        prefix_cache=options.prefix_cache,
        ahead=info.ahead,
        stretch=info.stretch,
        max_waiting_tokens=options.max_waiting_tokens,
    )


def _serve(link: Link, options: EngineOptions) -> None:
    engine = load_engine(options, link.end)
    engine.warm_up()
    limits = limits_of(options, engine.info)
    check_longest(limits, options.max_sequence_length)
    batcher = Batcher(limits, options.eos_ids)
    gc.freeze()  # what has been loaded stays: the collector need not look at it again
    lookups = None
    if options.prompts and engine.info.takes_adapters:
        lookups = Lookups(open_store(options.prompts, engine.info), link.send)
        link.divert(LookupPrompt, lookups.ask)
    link.send(Ready(engine.info))
    Worker(link, engine, batcher, lookups).run()
    engine.close()


def main() -> int:
    """Load the engine that the first message names, and serve."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    link = Link(socket.socket(fileno=int(sys.argv[1])), ToEngine)
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
