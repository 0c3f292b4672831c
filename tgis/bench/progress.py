"""Progress of a run, on stderr."""

import asyncio
import time
from typing import TextIO

from tgis.bench.measure import Report

TERMINAL_INTERVAL = 0.5  # seconds
LINE_INTERVAL = 5.0
CLEAR = "\r\x1b[K"


async def show_progress(report: Report, stream: TextIO) -> None:
    """Update one line of a terminal, or else print a line every few seconds, until cancelled."""
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
    """The current level, its results so far and the time that is left, in less than 80 columns."""
    if not report.results:
        return "connecting, warming up"
    result = report.results[-1]
    elapsed = time.perf_counter() - result.started
    statuses = [sample.status for sample in result.records]
    ok, running = statuses.count("OK"), statuses.count("")
    tokens = sum(sample.output_tokens for sample in result.records)
    failed = len(statuses) - ok - running
    parts = [
        f"{result.level.name} {result.level.value:g} ({len(report.results)} of {len(report.settings.levels)})",
        f"{ok} ok",
        *([f"{failed} failed"] if failed else []),
        f"{running} running",
        f"{tokens / elapsed:.0f} tokens/s",
    ]
    seconds = _seconds_left(report, ok + failed, elapsed)
    return ", ".join(parts) + ("" if seconds is None else f", {seconds // 60}:{seconds % 60:02} left")


def _seconds_left(report: Report, ended: int, elapsed: float) -> int | None:
    """The time left at the pace so far, assuming that later levels take as long; None before the first result."""
    settings = report.settings
    if settings.requests and not ended:
        return None
    whole = elapsed * settings.requests / ended if settings.requests else settings.duration or 0.0
    levels_left = len(settings.levels) - len(report.results)
    return round(max(whole - elapsed, 0.0) + whole * levels_left)
