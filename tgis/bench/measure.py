"""One run: connect, ask for the server's limits, then run one level after the other."""

import math
import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tgis.bench.client import CallOptions, Client, RequestRecord, connect
from tgis.bench.load import Budget, Level
from tgis.bench.summary import Summary, summarize
from tgis.bench.workload import (
    UNCALIBRATED,
    BenchRequest,
    Vocabulary,
    calibrate,
    calibration_texts,
    file_requests,
    lengths,
    random_requests,
)
from tgis.errors import StartError
from tgis.pb import generation_pb2 as pb

STREAMS_PER_CONNECTION = 100  # a common limit of servers
OPEN_LOOP_CONNECTIONS = 8


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """What to measure; lengths in tokens, times in seconds."""

    target: str
    levels: tuple[Level, ...]
    requests: int | None  # of each level; None: as many as fit `duration`
    duration: float | None
    prompts: Path | None  # None: random words
    input_tokens: int
    input_spread: float  # sigma of the log-normal lengths
    output_tokens: int
    output_spread: float
    ignore_eos: bool
    stream: bool
    warmup: int  # requests before each level
    seed: int
    timeout: float
    slo: Mapping[str, float] | None  # service level objectives: milliseconds, by name of `request_times`
    adapter_id: str | None
    prefix_id: str | None

    @property
    def connections(self) -> int:
        """Enough that no request waits for a free HTTP/2 stream."""
        closed = [level.value for level in self.levels if level.name == "concurrency"]
        return math.ceil(max(closed) / STREAMS_PER_CONNECTION) if closed else OPEN_LOOP_CONNECTIONS


@dataclass(slots=True)
class LevelResult:
    """A level and its measurements so far."""

    level: Level
    slo: Mapping[str, float] | None = None
    records: list[RequestRecord] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)
    cpu_started: float = field(default_factory=time.process_time)
    cpu_seconds: float = 0.0

    def summary(self) -> Summary:
        return summarize(self.records, self.cpu_seconds, self.slo)


@dataclass(slots=True)
class Report:
    """Everything that a run has measured so far."""

    settings: LoadSettings
    model: pb.ModelInfoResponse = field(default_factory=pb.ModelInfoResponse)
    calibrated: bool = True  # lengths of random prompts are in the server's tokens, not words
    interrupted: bool = False
    results: list[LevelResult] = field(default_factory=list)


async def measure(report: Report, options: CallOptions) -> None:
    """Fill in the report as the run goes on, so that an interrupted run has one too."""
    settings = report.settings
    async with connect(settings.target, settings.connections, options) as client:
        report.model = await client.model_info()
        _check_lengths(settings, report.model)
        jobs = await _make_requests(report, client)
        for level in settings.levels:
            if settings.warmup:
                await _drive(LevelResult(level), Budget(settings.warmup, None), client, jobs, settings)
            report.results.append(result := LevelResult(level, settings.slo))
            await _drive(result, Budget(settings.requests, settings.duration), client, jobs, settings)


def _check_lengths(settings: LoadSettings, model: pb.ModelInfoResponse) -> None:
    if 0 < model.max_new_tokens < settings.output_tokens:
        raise StartError(f"--output-tokens {settings.output_tokens}: the server allows {model.max_new_tokens}")
    total = settings.input_tokens + settings.output_tokens
    if settings.prompts is None and 0 < model.max_sequence_length < total:
        limit = model.max_sequence_length
        raise StartError(f"--input-tokens and --output-tokens make {total}: the server allows {limit}")


async def _make_requests(report: Report, client: Client) -> Iterator[BenchRequest]:
    settings, room = report.settings, report.model.max_sequence_length or None
    rngs = {name: random.Random(f"{settings.seed} {name}") for name in ("outputs", "inputs", "words")}
    outputs = lengths(
        settings.output_tokens, settings.output_spread, report.model.max_new_tokens or None, rngs["outputs"]
    )
    if settings.prompts is not None:
        return file_requests(settings.prompts, outputs)
    inputs = lengths(settings.input_tokens, settings.input_spread, None, rngs["inputs"])
    return random_requests(await _vocabulary(report, client), inputs, outputs, room, rngs["words"])


async def _vocabulary(report: Report, client: Client) -> Vocabulary:
    counts = await client.token_counts(calibration_texts())
    report.calibrated = counts is not None
    return UNCALIBRATED if counts is None else calibrate(counts)


async def _drive(
    result: LevelResult, budget: Budget, client: Client, jobs: Iterator[BenchRequest], settings: LoadSettings
) -> None:
    call = client.stream if settings.stream else client.unary

    async def send(due: float) -> bool:
        job = next(jobs)
        result.records.append(sample := RequestRecord(due, job.output_tokens))
        await call(job, _params(job, settings.ignore_eos), sample)
        return sample.status == "OK"

    try:
        await result.level.drive(send, budget)
    finally:
        result.cpu_seconds = time.process_time() - result.cpu_started


def _params(job: BenchRequest, ignore_eos: bool) -> pb.Parameters:
    fewest = job.output_tokens if ignore_eos else 0
    return pb.Parameters(stopping=pb.StoppingCriteria(max_new_tokens=job.output_tokens, min_new_tokens=fewest))
