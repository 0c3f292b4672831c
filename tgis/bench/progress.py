"""Progress of a run, on stderr."""

import asyncio
import time
from typing import TextIO

from tgis.bench.measure import Report

TERMINAL_INTERVAL = 0.5  # seconds
LINE_INTERVAL = 5.0
CLEAR = "\r\x1b[K"


async def show_progress(report: Report, stream: TextIO) -> None:
    """Until cancelled: update one line of a terminal, or else print a line every few seconds."""
    terminal = stream.isatty()
    try:
        while True:
            await asyncio.sleep(TERMINAL_INTERVAL if terminal else LINE_INTERVAL)
            stream.write(f"{CLEAR}{progress(report)}" if terminal else f"{progress(report)}\n")
            stream.flush()
    finally:
        stream.write(CLEAR if terminal else "")
        stream.flush()


def progress(report: Report) -> str:
    """The current level and its results so far."""
    if not report.results:
        return "connecting, warming up"
    result = report.results[-1]
    elapsed = time.perf_counter() - result.started
    statuses = [sample.status for sample in result.records]
    ok, running = statuses.count("OK"), statuses.count("")
    tokens = sum(sample.output_tokens for sample in result.records)
    return (
        f"level {len(report.results)} of {len(report.settings.levels)}, "
        f"{result.level.name} {result.level.value:g}: {elapsed:.0f} s, {running} running, {ok} ok, "
        f"{len(statuses) - ok - running} failed, {tokens / elapsed:.1f} output tokens/s"
    )
