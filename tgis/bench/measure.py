"""One run: count the tokens of words, then run one level after the other."""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from tgis.bench.client import BenchSettings, RequestRecord
from tgis.bench.grpc_client import GrpcClient
from tgis.bench.load import Budget, Level
from tgis.bench.summary import Summary, summarize
from tgis.bench.workload import (
    Vocabulary,
    calibrate,
    calibration_texts,
    file_prompts,
    random_prompts,
)
from tgis.errors import StartError
from tgis.utils.progress import watched


@dataclass(slots=True)
class LevelResult:
    """A level and its measurements so far."""

    level: Level
    settings: BenchSettings
    records: list[RequestRecord] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)
    cpu_seconds: float = 0.0
    server_cpu_seconds: float | None = None

    def summary(self) -> Summary:
        return summarize(self.records, self.cpu_seconds, self.server_cpu_seconds)


@dataclass(slots=True)
class Report:
    """Everything that a run has measured so far."""

    settings: BenchSettings
    calibrated: bool = True  # lengths of random prompts are in the server's tokens, not words
    interrupted: bool = False
    results: list[LevelResult] = field(default_factory=list)
    date: str = field(default_factory=lambda: time.strftime("%Y-%m-%d"))


async def measure(report: Report, client: GrpcClient, say: Callable[[str], None]) -> None:
    """Fill in the report as the run goes on, so that an interrupted run has one too; `say` which level begins."""
    settings = report.settings
    prompts = await _make_prompts(report, client)
    for level in settings.levels:
        say(f"{level.name} {level.value:g} ...")
        if settings.warmup:
            await _drive(LevelResult(level, settings), Budget(settings.warmup, None), client, prompts)
        report.results.append(result := LevelResult(level, settings))
        with _progress(result):
            await _drive(result, Budget(settings.requests, settings.duration), client, prompts)


def _progress(result: LevelResult) -> AbstractContextManager[None]:
    settings = result.settings
    if settings.requests:
        return watched("requests", lambda: sum(bool(record.status) for record in result.records), settings.requests)
    return watched("seconds", lambda: int(time.perf_counter() - result.started), settings.duration)


async def _make_prompts(report: Report, client: GrpcClient) -> Iterator[str]:
    settings = report.settings
    if settings.prompts is not None:
        return file_prompts(settings.prompts)
    counts = [await _count_tokens(client, text) for text in calibration_texts()]
    report.calibrated = all(counts)
    vocabulary = calibrate(counts) if report.calibrated else Vocabulary()
    rng = random.Random(f"{settings.seed} words")
    return random_prompts(vocabulary, settings.input_tokens, rng)


async def _count_tokens(client: GrpcClient, text: str) -> int:
    """The input tokens of a request, special tokens included; 0 if the server does not count them."""
    record = RequestRecord(time.perf_counter(), requested_tokens=1)
    await client.send(text, record)
    return record.input_tokens


async def _drive(result: LevelResult, budget: Budget, client: GrpcClient, prompts: Iterator[str]) -> None:
    async def send(due: float) -> bool:
        result.records.append(sample := RequestRecord(due, result.settings.output_tokens))
        await client.send(next(prompts), sample)
        return sample.status == "OK"

    pid = result.settings.server_pid
    before, server_before = time.process_time(), 0.0 if pid is None else cpu_seconds(pid)
    try:
        await result.level.drive(send, budget)
    finally:
        result.cpu_seconds = time.process_time() - before
        if pid is not None:
            result.server_cpu_seconds = cpu_seconds(pid) - server_before


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far; StartError if there is none."""
    try:
        return time.clock_gettime(~pid << 3 | 2)  # clock_getcpuclockid(3)
    except OSError as error:
        raise StartError(f"no process {pid} on this machine") from error
