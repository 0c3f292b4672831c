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
from tgis.batcher.memory_model import BatchLimits, MemoryModel, check_max_sequence_length
from tgis.batcher.sequence import Sequence, StepPlan
from tgis.batcher.step_stats import StepRecorder
from tgis.engines import load_engine
from tgis.engines.base import Engine, StepResult
from tgis.errors import OutOfMemory, StartError, TgisError
from tgis.ipc.adapters import ResolveAdapter
from tgis.ipc.channel import Channel
from tgis.ipc.messages import (
    Cancel,
    EngineInfo,
    EngineOptions,
    Failed,
    FailureKind,
    Fatal,
    GetSnapshot,
    Ready,
    Shutdown,
    Step,
    StepStats,
    Submit,
    ToEngine,
)
from tgis.ipc.request import Request
from tgis.prompts import open_store
from tgis.prompts.resolver import AdapterResolver
from tgis.utils import logs

log = logging.getLogger(__name__)

_MAX_SNAPSHOT_SEQS = 100  # in a snapshot, of those that run and of those that wait


class EngineCore:
    """The loop of the engine process."""

    def __init__(
        self, channel: Channel, engine: Engine, batcher: Batcher, resolver: AdapterResolver | None = None
    ) -> None:
        self._channel = channel
        self._resolver = resolver
        self._engine = engine
        self._padded = engine.info.padded
        self._batcher = batcher

    def run(self) -> None:
        """Serve until Shutdown."""
        while self._handle(self._channel.receive(wait=self._batcher.idle)):
            expired = self._batcher.expire(time.monotonic())
            if expired:
                self._send_step(expired, [[]] * len(expired))
            plan = self._batcher.plan(time.monotonic())
            self._engine.release(plan.to_release)
            if plan.seqs:
                self._step(plan)

    def _handle(self, messages: list[ToEngine]) -> bool:
        for message in messages:
            match message:
                case Submit(requests, at):
                    self._submit(requests, at)
                case Cancel(ids):
                    self._batcher.cancel(ids)
                    if self._resolver:
                        self._resolver.release(ids)
                case GetSnapshot():
                    self._channel.send(self._batcher.snapshot(time.monotonic(), _MAX_SNAPSHOT_SEQS))
                case Shutdown():
                    return False
                case _:
                    raise AssertionError(f"unexpected {type(message).__name__}")
        return True

    def _submit(self, requests: list[Request], at: float) -> None:
        for row in self._batcher.submit(requests, at):
            if row.request.adapter:
                assert self._resolver is not None
                row.adapter = self._resolver.adapter(row.request.adapter)

    def _step(self, plan: StepPlan) -> None:
        started_at = time.monotonic()
        try:
            result = self._engine.step(plan)
        except OutOfMemory as error:
            self._rollback(plan, FailureKind.OUT_OF_MEMORY, str(error))
        except StartError:
            raise  # the engine cannot go on
        except Exception as error:
            log.exception("a step of %d rows failed", len(plan.seqs))
            self._rollback(plan, FailureKind.ERROR, f"{type(error).__name__}: {error}")
        else:
            self._commit(plan, result, started_at, time.monotonic())

    def _rollback(self, plan: StepPlan, kind: FailureKind, message: str) -> None:
        """Nobody got a token. The rows are tried again, but for those that failed alone."""
        refused = self._batcher.rollback(plan, out_of_memory=kind is FailureKind.OUT_OF_MEMORY)
        log.warning("%d rows of a failed step (%s) are tried again", len(plan.seqs) - len(refused), kind)
        self._channel.send(Failed([row.id for row in refused], kind, message, plan.has_prefill))

    def _commit(self, plan: StepPlan, result: StepResult, started_at: float, computed_at: float) -> None:
        report = StepRecorder(plan, self._batcher, padded=self._padded, started_at=started_at)
        if result.failed:
            plan, result = self._without_failed(plan, result)
        starts = [len(row.tokens) for row in plan.sampled]
        self._batcher.commit(plan, result.tokens, computed_at)
        tokens = [row.tokens[start:] for row, start in zip(plan.sampled, starts, strict=True)]
        self._send_step(plan.sampled, tokens, result, report.stats(computed_at, time.monotonic()))

    def _without_failed(self, plan: StepPlan, result: StepResult) -> tuple[StepPlan, StepResult]:
        """The step without the rows that the engine could not choose a token for; they get an error."""
        self._batcher.drop([seq for seq in plan.seqs if seq.id in result.failed])
        for request_id, reason in result.failed.items():
            self._channel.send(Failed([request_id], FailureKind.ERROR, reason))
        kept = [i for i, seq in enumerate(plan.sampled) if seq.id not in result.failed]
        logprobs = [result.logprobs[i] for i in kept] if result.logprobs else []
        survivors = StepResult([result.tokens[i] for i in kept], logprobs, result.prompt_logprobs)
        return plan.without(result.failed), survivors

    def _send_step(
        self,
        rows: list[Sequence],
        tokens: list[list[int]],
        result: StepResult | None = None,
        stats: StepStats | None = None,
    ) -> None:
        self._channel.send(
            Step(
                ids=[row.id for row in rows],
                tokens=tokens,
                stop_reasons=[row.stop_reason for row in rows],
                logprobs=result.logprobs if result else [],
                prompt_logprobs=result.prompt_logprobs if result else {},
                stats=stats,
            )
        )


def batch_limits(options: EngineOptions, info: EngineInfo) -> BatchLimits:
    """What bounds the batches of this engine."""
    return BatchLimits(
        max_batch_size=info.max_batch_size,
        memory=MemoryModel(
            info.token_capacity,
            prefill_linear=info.prefill_linear,
            prefill_quadratic_0=info.prefill_linear,
            prefill_quadratic_1=info.prefill_quadratic,
        ),
        prefill_tokens=info.max_prefill_tokens,
        max_prefill_padding=options.max_prefill_padding,
        padded=info.padded,
        block_size=info.block_size,
        prefix_cache=options.prefix_cache,
        lookahead=info.lookahead,
        max_slowdown=info.max_slowdown,
        max_waiting_tokens=options.max_waiting_tokens,
    )


def _serve(channel: Channel, options: EngineOptions) -> None:
    engine = load_engine(options, channel.abort)
    engine.warm_up()
    limits = batch_limits(options, engine.info)
    check_max_sequence_length(limits, options.max_sequence_length)
    batcher = Batcher(limits, options.eos_ids)
    gc.freeze()  # what has been loaded stays: the collector need not look at it again
    resolver = None
    if options.adapter_store and engine.info.supports_adapters:
        resolver = AdapterResolver(open_store(options.adapter_store, engine.info), channel.send)
        channel.handle_inline(ResolveAdapter, resolver.resolve)
    channel.send(Ready(engine.info))
    EngineCore(channel, engine, batcher, resolver).run()
    engine.close()


def main() -> int:
    """Load the engine that the first message names, and serve."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=int(sys.argv[1])), ToEngine)
    first = channel.receive(wait=True)
    assert len(first) == 1
    assert isinstance(first[0], EngineOptions)
    logs.configure(level=first[0].log_level, json_output=first[0].json_output, process="engine")
    try:
        _serve(channel, first[0])
    except TgisError as error:
        channel.send(Fatal(str(error)))
        return 1
    except Exception as error:
        log.exception("the engine process cannot go on")
        channel.send(Fatal(f"{type(error).__name__}: {error}"))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
