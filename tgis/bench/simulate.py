"""A deployment without hardware: the real batcher, a step-time model, and a trace of requests, in made-up time.

For comparing policies and picking options. Requests come at the times of the trace (open loop), or each of so many
clients sends its next one when its last has ended (closed loop). What computes the steps may also be a real engine:
then the time is that of its steps, and of nothing else.
"""

import csv
import heapq
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, Protocol

from tgis.batcher.batcher import Batcher
from tgis.batcher.memory_model import Limits, area
from tgis.batcher.sequence import Plan, Sequence
from tgis.engines.fake import StepModel
from tgis.errors import OptionError
from tgis.ipc.messages import Admissions, Details, Request, Sampling

# SmolLM2-135M in bf16 on two cores: steps of 16.9, 21.4, 40.7 and 70 ms at 1, 8, 32 and 64 rows of 150 tokens.
TWO_CORES = StepModel(
    padded=True, step_seconds=0.0155, row_seconds=0.00035, context_seconds=3.2e-6, prefill_token_seconds=0.00040
)


@dataclass(frozen=True, slots=True)
class Job:
    """A request of a trace: seconds from the start, tokens in, tokens out."""

    arrival: float
    length: int
    new: int


@dataclass(frozen=True, slots=True)
class Sample:
    """The queue and the batch after a step."""

    time: float
    waiting: int
    running: int


@dataclass(slots=True)
class Outcome:
    """What a run gave; times in seconds."""

    seconds: float = 0.0
    tokens: int = 0
    first: list[float] = field(default_factory=list)  # token, from arrival
    between: list[float] = field(default_factory=list)  # tokens after the first, mean of each request
    gaps: list[float] = field(default_factory=list)  # between tokens, longest of each request
    row_steps: int = 0
    decodes: int = 0
    prefills: int = 0
    prefilled: list[int] = field(default_factory=lambda: [0, 0])  # tokens, and with padding
    decoded: list[int] = field(default_factory=lambda: [0, 0])  # tokens of context, and with padding
    admissions: Admissions = field(default_factory=Admissions)
    samples: list[Sample] = field(default_factory=list)

    def summary(self) -> dict[str, float]:
        """The figures, ready for JSON."""
        figures = {"requests": len(self.first), "tokens_per_second": self.tokens / self.seconds}
        for name, values in (("ttft", self.first), ("tpot", self.between), ("longest_gap", self.gaps)):
            for percent in (50, 99):
                figures[f"{name}_p{percent}_ms"] = 1e3 * _percentile(values, percent)
        figures["rows_per_step"] = self.row_steps / max(self.decodes, 1)
        figures["prefills"] = self.prefills
        figures["prefill_padding"] = _waste(self.prefilled)
        figures["decode_padding"] = _waste(self.decoded)
        return {name: round(value, 4) for name, value in figures.items()}


class Machine(Protocol):
    """What computes steps."""

    def step(self, plan: Plan) -> tuple[list[int], float]:
        """A token for each sampled row, and the seconds that the step took."""

    def release(self, rows: list[Sequence]) -> None:
        """Forget rows that have ended."""


@dataclass(frozen=True, slots=True)
class Imagined:
    """Takes the time that the model says, and does nothing."""

    model: StepModel

    def step(self, plan: Plan) -> tuple[list[int], float]:
        """Tokens that mean nothing."""
        return [0] * len(plan.sampled), self.model.seconds(plan)

    def release(self, rows: list[Sequence]) -> None:
        """Nothing is held."""


class Simulation:
    """One run of a trace."""

    def __init__(self, limits: Limits, machine: Machine, jobs: Iterable[Job], clients: int = 0) -> None:
        """With `clients` the arrival times of the jobs are not used."""
        self._batcher = Batcher(limits, ())
        self._padded = limits.padded
        self._machine = machine
        self._clients = clients
        self._jobs = enumerate(jobs)
        self._now = 0.0
        self._arrivals: list[tuple[float, int, Job]] = []  # known, to come
        self._tokens: dict[int, tuple[float, list[float]]] = {}  # request id -> arrival, times of tokens
        self.outcome = Outcome()

    def run(self) -> Outcome:
        """Until the last request has ended."""
        first = islice(self._jobs, self._clients or None)
        self._arrivals = [(0.0 if self._clients else job.arrival, number, job) for number, job in first]
        heapq.heapify(self._arrivals)
        while self._arrivals or not self._batcher.idle:
            if self._batcher.idle:
                self._now = max(self._now, self._arrivals[0][0])
            self._arrive()
            plan = self._batcher.plan(self._now)
            assert plan is not None, "requests wait and nothing runs"
            self._step(plan)
        self.outcome.seconds = self._now
        self.outcome.admissions = self._batcher.take_admissions()
        return self.outcome

    def _arrive(self) -> None:
        while self._arrivals and self._arrivals[0][0] <= self._now:
            arrival, number, job = heapq.heappop(self._arrivals)
            self._tokens[number] = arrival, []
            tokens = [*range(job.length)]
            request = Request(number, tokens, job.new, capped=False, sampling=Sampling(), details=Details())
            self._batcher.submit([request], arrival)

    def _step(self, plan: Plan) -> None:
        self._count(plan)
        tokens, seconds = self._machine.step(plan)
        self._now += seconds
        ended = self._batcher.commit(plan, tokens, self._now)
        self._machine.release(ended)
        for row in plan.sampled:
            self._tokens[row.id][1].append(self._now)
        for row in ended:
            self._end(row)
        self.outcome.samples.append(Sample(self._now, self._batcher.waiting, self._batcher.running))

    def _count(self, plan: Plan) -> None:
        outcome = self.outcome
        decoding = [len(row.tokens) for row in plan.rows if row.decoding]
        chunks = plan.prompt_counts
        outcome.decodes += bool(decoding)
        outcome.row_steps += len(decoding)
        outcome.prefills += bool(chunks)
        for total, lengths in ((outcome.decoded, decoding), (outcome.prefilled, chunks)):
            total[0] += sum(lengths)
            total[1] += area(lengths, self._padded)

    def _end(self, row: Sequence) -> None:
        arrival, times = self._tokens.pop(row.id)
        outcome = self.outcome
        outcome.tokens += len(times)
        outcome.first.append(times[0] - arrival)
        if len(times) > 1:
            outcome.between.append((times[-1] - times[0]) / (len(times) - 1))
            outcome.gaps.append(max(late - early for early, late in pairwise(times)))
        if self._clients:
            for number, job in islice(self._jobs, 1):
                heapq.heappush(self._arrivals, (self._now, number, job))


def lognormal(count: int, rate: float, seed: int, length: int = 60, new: int = 60) -> Iterator[Job]:
    """Lengths around these medians, as chat traffic has; Poisson arrivals, `rate` per second."""
    draw, now = random.Random(seed), 0.0
    for _ in range(count):
        now += draw.expovariate(rate)
        lengths = [min(max(round(median * draw.lognormvariate(0, 0.6)), 1), 20 * median) for median in (length, new)]
        yield Job(now, lengths[0], lengths[1])


def bimodal(count: int, rate: float, seed: int) -> Iterator[Job]:
    """Nine of ten with 32 tokens in and out, one with 1024 in and 256 out."""
    draw, now = random.Random(seed), 0.0
    for _ in range(count):
        now += draw.expovariate(rate)
        yield Job(now, 1024, 256) if draw.random() < 0.1 else Job(now, 32, 32)


def read_trace(path: Path) -> list[Job]:
    """A CSV with the columns of Azure's public traces: TIMESTAMP, ContextTokens, GeneratedTokens."""
    try:
        with path.open(newline="") as file:
            rows = [(_seconds(r["TIMESTAMP"]), r["ContextTokens"], r["GeneratedTokens"]) for r in csv.DictReader(file)]
        start = min((time for time, _, _ in rows), default=0.0)
        return sorted((Job(time - start, int(i), max(int(o), 1)) for time, i, o in rows), key=lambda job: job.arrival)
    except (OSError, KeyError, ValueError, TypeError, csv.Error) as error:
        raise OptionError(f"{path} is no trace: {type(error).__name__}: {error}") from error


def plot(outcome: Outcome, path: Path) -> None:
    """Draw the queue and the batch over time."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - for this option only

    times = [sample.time for sample in outcome.samples]
    axes: Any = Figure(figsize=(10, 4), layout="constrained").subplots()
    axes.step(times, [sample.running for sample in outcome.samples], label="rows that run", where="post")
    axes.step(times, [sample.waiting for sample in outcome.samples], label="requests that wait", where="post")
    axes.set(xlabel="seconds", ylabel="requests")
    axes.legend()
    axes.figure.savefig(path)


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return datetime.fromisoformat(text).timestamp()


def _percentile(values: list[float], percent: int) -> float:
    return sorted(values)[min(len(values) * percent // 100, len(values) - 1)] if values else 0.0


def _waste(tokens: list[int]) -> float:
    return 1 - tokens[0] / tokens[1] if tokens[1] else 0.0
