"""Runs `benchmarks.peer_engine` as a child process and turns what it answers into the records of `tgis bench`."""

import contextlib
import json
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from tgis.bench.client import RequestRecord
from tgis.bench.summary import summarize
from tgis.errors import StartError

MOST_TAKEN = 0.15  # cores, by others, on average while a load runs
_FIGURES = ("requests_per_s", "output_tokens_per_s", "duration_s", "latency_ms", "ttft_ms", "tpot_ms", "max_gap_ms")


@dataclass(slots=True)
class Measured:
    """A load on one system; CPU seconds by part."""

    records: list[RequestRecord]
    cpu: dict[str, float]
    texts: list[str] | None = None  # where there are tokens to compare


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """An engine that is ready, in a process of its own."""

    pid: int
    start_seconds: float
    orders: IO[str]
    answers: IO[str]

    def run(self, streams: int, output_tokens: int, inputs: list[list[int]]) -> tuple[Measured, list[list[int]]]:
        """Keep so many requests in flight until each input has its output tokens, which are returned, too."""
        order = {"streams": streams, "output_tokens": output_tokens, "prompts": inputs}
        print(json.dumps(order), file=self.orders, flush=True)
        answer = json.loads(self.answers.readline())
        records = [
            RequestRecord(
                requested_tokens=output_tokens,
                sent_at=times["scheduled_at"],
                input_tokens=len(tokens),
                output_tokens=len(output),
                status="OK",
                **times,
            )
            for tokens, output, times in zip(inputs, answer["outputs"], answer["requests"], strict=True)
        ]
        return Measured(records, {"engine": answer["cpu_seconds"]}), answer["outputs"]


@contextlib.contextmanager
def engine_process(python: str, *arguments: str) -> Iterator[EngineProcess]:
    """Start the engine that `peer_engine.py ARGUMENTS...` names; StartError if it ends before it is ready."""
    started, command = time.monotonic(), [python, str(Path(__file__).with_name("peer_engine.py")), *arguments]
    with subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        while (line := process.stdout.readline()) != "ready\n":  # libraries may print, too
            if not line:
                raise StartError(f"{' '.join(command)} does not start")
        yield EngineProcess(process.pid, time.monotonic() - started, process.stdin, process.stdout)
        process.stdin.close()


def timed(run: Callable[[], Measured]) -> tuple[Measured, dict[str, Any]]:
    """A load and its figures, with the cores that others took meanwhile."""
    before = _machine_seconds()
    measured = run()
    busy, stolen = (now - then for now, then in zip(_machine_seconds(), before, strict=True))
    summary = summarize(measured.records, measured.cpu.get("client", 0.0))
    assert summary.ok == len(measured.records), summary
    taken = (busy + stolen - sum(measured.cpu.values())) / summary.duration_s
    others = {"taken_cores": taken, "stolen_cores": stolen / summary.duration_s}
    return measured, {name: asdict(summary)[name] for name in _FIGURES} | {"cpu_s": measured.cpu} | others


def _machine_seconds() -> tuple[float, float]:
    """CPU seconds that all processes of this machine have used, and that other VMs have taken from it."""
    user, nice, system, _, _, irq, softirq, steal, *_ = map(int, Path("/proc/stat").read_text().split()[1:11])
    return (user + nice + system + irq + softirq) / 100, steal / 100
