"""A deployment without hardware: the real batcher, a model of step times, and a trace of requests, in simulated time.

For comparing policies and choosing options. Requests arrive at the times of the trace (open loop), or each of a number
of clients sends its next one when its last has ended (closed loop). The steps may also be those of a real engine: then
their duration is measured, and nothing else.
"""

import csv
import heapq
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Protocol

from tgis.batcher.batcher import Batcher
from tgis.batcher.capacity import BatchLimits, padded_tokens
from tgis.batcher.sequence import Sequence, StepPlan
from tgis.bench.client import RequestRecord
from tgis.bench.summary import percentiles, request_times
from tgis.engines.fake import StepModel
from tgis.errors import OptionError
from tgis.ipc.messages import BatcherCounters
from tgis.ipc.request import Request

# SmolLM2-135M in bf16 on two cores: steps of 16.9, 21.4, 40.7 and 70 ms at 1, 8, 32 and 64 sequences of 150 tokens.
SMOLLM2_TWO_CORES = StepModel(
    padded=True, step_seconds=0.0155, row_seconds=0.00035, context_seconds=3.2e-6, prefill_token_seconds=0.00040
)


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A request of a trace; `arrival_time` is in seconds after the start."""

    arrival_time: float
    prompt_tokens: int
    output_tokens: int


@dataclass(slots=True)
class SimulationResult:
    """Records of the requests, and counts of the batches."""

    seconds: float = 0.0
    records: dict[int, RequestRecord] = field(default_factory=dict)  # by request id
    decoded_seqs: int = 0
    num_decodes: int = 0
    num_prefills: int = 0
    prefill_tokens: list[int] = field(default_factory=lambda: [0, 0])  # tokens, and with padding
    decode_tokens: list[int] = field(default_factory=lambda: [0, 0])  # tokens of context, and with padding
    counters: BatcherCounters = field(default_factory=BatcherCounters)

    @property
    def tokens(self) -> int:
        return sum(record.output_tokens for record in self.records.values())

    def times(self, name: str) -> list[float]:
        """Seconds, by a name of `request_times`, of the requests that have it."""
        found = map(request_times, self.records.values())
        return [each[name] for each in found if name in each]

    def summary(self) -> dict[str, float]:
        """The figures, ready for JSON."""
        figures = {"requests": len(self.records), "tokens_per_second": self.tokens / max(self.seconds, 1e-6)}
        for shown, name in (("ttft", "ttft"), ("tpot", "tpot"), ("longest_gap", "gap")):
            found = percentiles(self.times(name))
            figures |= {f"{shown}_p50_ms": found.p50 or 0.0, f"{shown}_p99_ms": found.p99 or 0.0}
        figures["rows_per_step"] = self.decoded_seqs / max(self.num_decodes, 1)
        figures["prefills"] = self.num_prefills
        figures["prefill_padding"] = _padding_ratio(self.prefill_tokens)
        figures["decode_padding"] = _padding_ratio(self.decode_tokens)
        return {name: round(value, 4) for name, value in figures.items()}


class StepEngine(Protocol):
    """Computes steps."""

    def step(self, plan: StepPlan) -> tuple[list[list[int]], float]:
        """The new tokens of each sampled sequence, and the seconds that the step took."""

    def release(self, seqs: Iterable[Sequence]) -> None:
        """Forget sequences that have left the batch."""


@dataclass(frozen=True, slots=True)
class SimulatedEngine:
    """Takes the time that the model of step times says, and computes nothing: each token is the next one of a copy of
    the prompt, with the chance `acceptance`.
    """

    model: StepModel
    acceptance: float = 0.0
    _draw: random.Random = field(default_factory=lambda: random.Random(1))

    def step(self, plan: StepPlan) -> tuple[list[list[int]], float]:
        tokens = [self._next_tokens(seq, plan.proposals.get(seq.id, [])) for seq in plan.sampled]
        return tokens, self.model.seconds(plan)

    def _next_tokens(self, seq: Sequence, proposed: list[int]) -> list[int]:
        new: list[int] = []
        while len(new) <= len(proposed) and new == proposed[: len(new)]:
            copied = seq.tokens[(seq.num_generated_tokens + len(new)) % seq.prompt_length]
            new.append(copied if self._draw.random() < self.acceptance else self._draw.getrandbits(30))
        return new

    def release(self, seqs: Iterable[Sequence]) -> None:
        pass


class Simulation:
    """One run of a trace."""

    def __init__(
        self,
        limits: BatchLimits,
        engine: StepEngine,
        trace: Iterable[TraceRequest],
        clients: int = 0,
        vocab_size: int = 100,
    ) -> None:
        """With `clients` the arrival times of the trace are not used. Prompts are random tokens of the vocabulary."""
        self._batcher = Batcher(limits, ())
        self._padded = limits.padded
        self._engine = engine
        self._clients = clients
        self._vocab_size = vocab_size
        self._trace = enumerate(trace)
        self._now = 0.0
        self._arrivals: list[tuple[float, int, TraceRequest]] = []  # the next ones
        self.result = SimulationResult()

    def run(self) -> SimulationResult:
        """Run until the last request has ended."""
        first = islice(self._trace, self._clients or None)
        self._arrivals = [(0.0 if self._clients else one.arrival_time, number, one) for number, one in first]
        heapq.heapify(self._arrivals)
        while self._arrivals or not self._batcher.idle:
            if self._batcher.idle:
                self._now = max(self._now, self._arrivals[0][0])
            self._arrive()
            plan = self._batcher.plan(self._now)
            self._engine.release(plan.to_release)
            if plan.seqs:
                self._step(plan)
            else:
                assert self._batcher.idle, "requests wait and nothing runs"
        self.result.seconds = self._now
        self.result.counters = self._batcher.take_counters()
        return self.result

    def _arrive(self) -> None:
        while self._arrivals and self._arrivals[0][0] <= self._now:
            arrival, number, request = heapq.heappop(self._arrivals)
            self.result.records[number] = RequestRecord(arrival, request.output_tokens)
            tokens = random.Random(number).choices(range(self._vocab_size), k=request.prompt_tokens)
            one = Request(number, tokens, request.output_tokens)
            self._batcher.submit([one], arrival)

    def _step(self, plan: StepPlan) -> None:
        self._count(plan)
        tokens, seconds = self._engine.step(plan)
        self._now += seconds
        ended = self._batcher.commit(plan, tokens, self._now)
        for seq, new_tokens in zip(plan.sampled, tokens, strict=True):
            record = self.result.records[seq.id]
            record.record_output(self._now, record.output_tokens + len(new_tokens))
        for number, request in islice(self._trace, len(ended) if self._clients else 0):
            heapq.heappush(self._arrivals, (self._now, number, request))

    def _count(self, plan: StepPlan) -> None:
        result = self.result
        decoding = [len(seq.tokens) for seq in plan.seqs if seq.decoding]
        chunks = plan.num_prefill_tokens
        result.num_decodes += bool(decoding)
        result.decoded_seqs += len(decoding)
        result.num_prefills += bool(chunks)
        for total, lengths in ((result.decode_tokens, decoding), (result.prefill_tokens, chunks)):
            total[0] += sum(lengths)
            total[1] += padded_tokens(lengths, self._padded)


def lognormal_trace(count: int, rate: float, seed: int, length: int = 60, new: int = 60) -> Iterator[TraceRequest]:
    """Log-normal lengths around these medians, as in chat traffic; Poisson arrivals, `rate` per second."""
    draw, now = random.Random(seed), 0.0
    for _ in range(count):
        now += draw.expovariate(rate)
        lengths = [min(max(round(median * draw.lognormvariate(0, 0.6)), 1), 20 * median) for median in (length, new)]
        yield TraceRequest(now, lengths[0], lengths[1])


def bimodal_trace(count: int, rate: float, seed: int) -> Iterator[TraceRequest]:
    """Nine requests of ten have 32 tokens in and out, one has 1024 in and 256 out."""
    draw, now = random.Random(seed), 0.0
    for _ in range(count):
        now += draw.expovariate(rate)
        yield TraceRequest(now, 1024, 256) if draw.random() < 0.1 else TraceRequest(now, 32, 32)


def read_trace(path: Path) -> list[TraceRequest]:
    """A CSV with the columns of Azure's public traces: TIMESTAMP, ContextTokens, GeneratedTokens."""
    try:
        with path.open(newline="") as file:
            rows = [(_seconds(r["TIMESTAMP"]), r["ContextTokens"], r["GeneratedTokens"]) for r in csv.DictReader(file)]
        if not math.isfinite(sum(time for time, _, _ in rows)):
            raise ValueError("a TIMESTAMP is not finite")
        start = min(time for time, _, _ in rows)
        return sorted(
            (TraceRequest(time - start, max(int(i), 1), max(int(o), 1)) for time, i, o in rows),
            key=lambda request: request.arrival_time,
        )
    except (OSError, KeyError, ValueError, TypeError, csv.Error) as error:
        raise OptionError(f"{path} is no trace: {type(error).__name__}: {error}") from error


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return datetime.fromisoformat(text).timestamp()


def _padding_ratio(tokens: list[int]) -> float:
    return 1 - tokens[0] / tokens[1] if tokens[1] else 0.0
