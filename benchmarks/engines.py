"""Engines in this process, and the real batcher that gives them their steps."""

import random
import sys
import time
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from tgis.batcher.batcher import Batcher
from tgis.batcher.capacity import BatchLimits
from tgis.batcher.sequence import Sequence, StepPlan
from tgis.bench.client import RequestRecord
from tgis.engine_core.main import batch_limits
from tgis.engines import load_engine
from tgis.engines.base import Engine
from tgis.ipc.messages import EngineOptions
from tgis.ipc.request import Request
from tgis.utils.cpus import usable_cores

MAX_SEQUENCE_LENGTH = 2048


@dataclass(frozen=True, slots=True)
class Job:
    """A request; `arrival` is in seconds after the start."""

    prompt_tokens: int
    output_tokens: int
    arrival: float = 0.0


class StepEngine(Protocol):
    """Computes steps."""

    def step(self, plan: StepPlan) -> tuple[list[list[int]], float]:
        """The new tokens of each sampled sequence, and the seconds that the step took."""

    def release(self, seqs: Iterable[Sequence]) -> None:
        """Forget sequences that have left the batch."""


@dataclass(slots=True)
class TimedEngine:
    """A real engine whose step times are wall-clock times, planning between the steps included."""

    engine: Engine
    _last: float = field(default_factory=time.perf_counter)

    def step(self, plan: StepPlan) -> tuple[list[list[int]], float]:
        """The tokens, and the seconds since the previous step."""
        result = self.engine.step(plan)
        assert not result.failed
        started, self._last = self._last, time.perf_counter()
        return result.tokens, self._last - started

    def release(self, seqs: Iterable[Sequence]) -> None:
        self.engine.release([*seqs])


def run_jobs(
    limits: BatchLimits, engine: StepEngine, jobs: SequenceOf[Job], vocab_size: int = 100
) -> list[RequestRecord]:
    """Run jobs, sorted by arrival, until all have ended. Prompts are random tokens; time passes in steps only."""
    batcher, now = Batcher(limits, ()), 0.0
    records = [RequestRecord(job.arrival, job.output_tokens) for job in jobs]
    waiting = deque(enumerate(jobs))
    while waiting or not batcher.idle:
        if batcher.idle:
            now = max(now, waiting[0][1].arrival)
        while waiting and waiting[0][1].arrival <= now:
            number, job = waiting.popleft()
            tokens = random.Random(number).choices(range(vocab_size), k=job.prompt_tokens)
            batcher.submit([Request(number, tokens, job.output_tokens)], job.arrival)
        plan = batcher.plan(now)
        engine.release(plan.to_release)
        if not plan.seqs:
            assert batcher.idle, "requests wait and nothing runs"
            continue
        new_tokens, seconds = engine.step(plan)
        now += seconds
        for seq, new in zip(plan.sampled, new_tokens, strict=True):
            records[seq.id].record_output(now, records[seq.id].output_tokens + len(new))
            records[seq.id].succeed(now)
        batcher.commit(plan, new_tokens, now)
    return records


def engine_options(name: str, model: Path, dtype: str, size: int, cache: Path = Path(".cache")) -> EngineOptions:
    """A server's default options, but for the batch size and a disabled prefix cache."""
    return EngineOptions(
        engine=name,
        model_path=str(model),
        dtype=dtype,
        eos_ids=(),
        max_sequence_length=MAX_SEQUENCE_LENGTH,
        max_batch_size=size,
        max_prefill_padding=0.2,
        max_waiting_tokens=24,
        batch_safety_margin=20,
        cuda_memory_fraction=1.0,
        num_threads=usable_cores(),
        log_level="warning",
        json_output=False,
        prefix_cache=False,
        cache_dir=str(cache),
    )


def load_warm_engine(options: EngineOptions) -> tuple[Engine, BatchLimits]:
    """An engine after its warm-up, and the limits of its batches."""
    engine, _ = load_engine(options, sys.exit, print)
    engine.warm_up()
    return engine, batch_limits(options, engine.info)
