"""Formats a report: a table and notes for people, JSON for programs."""

import json
from collections.abc import Iterator
from dataclasses import asdict

from tgis.bench.client import RequestRecord
from tgis.bench.measure import LevelResult, Report
from tgis.bench.summary import Percentiles, request_times

MAX_CLIENT_CPU = 0.8  # share of a core; above it the load generator's own times are doubtful
MAX_DETAIL_CHARS = 200  # characters of an error message
TIMES = {"ttft": "ttft_ms", "tpot": "tpot_ms", "gap": "max_gap_ms", "latency": "latency_ms"}

_FIGURES = {  # name of a row -> field of a Summary
    "ok": "ok",
    "failed": "num_failed",
    "good": "good",
    "requests/s": "requests_per_s",
    "good requests/s": "goodput_per_s",
    "input tokens/s": "input_tokens_per_s",
    "output tokens/s": "output_tokens_per_s",
    "server CPU, us/token": "server_cpu_us_per_token",
}


def format_table(report: Report) -> str:
    """A title, then a column for each level and a row for each figure that any of them has."""
    settings, summaries = report.settings, [result.summary() for result in report.results]
    rows = {name: [getattr(summary, field) for summary in summaries] for name, field in _FIGURES.items()}
    for name, field in TIMES.items():
        times: list[Percentiles] = [getattr(summary, field) for summary in summaries]
        rows |= {f"{name} {each}, ms": [getattr(time, each) for time in times] for each in ("p50", "p90", "p99")}
    cells = {settings.levels[0].name: [f"{result.level.value:g}" for result in report.results]}
    cells |= {
        name: [*map(_format_number, row)] for name, row in rows.items() if any(value is not None for value in row)
    }
    width = 2 + max((len(cell) for row in cells.values() for cell in row), default=0)
    title = f"{settings.target}, {'streamed' if settings.stream else 'unary'}"
    objectives = ", ".join(f"{name} at most {most:g} ms" for name, most in (settings.slo or {}).items())
    table = [f"{name:<22}{''.join(cell.rjust(width) for cell in row)}" for name, row in cells.items()]
    return "\n".join([title, *([f"good: {objectives}"] if objectives else []), "", *table])


def format_notes(report: Report) -> Iterator[str]:
    """Remarks that a reader of the table needs."""
    if report.interrupted:
        yield "interrupted: requests that were under way are not counted"
    if not report.calibrated:
        yield "the server does not count tokens: input lengths are in words"
    for result in report.results:
        level, summary = f"{result.level.name} {result.level.value:g}", result.summary()
        for status, count in summary.failed.items():
            detail = next(sample.detail for sample in result.records if sample.status == status)
            yield f"{level}: {count} failed with {status}, the first: {' '.join(detail.split())[:MAX_DETAIL_CHARS]}"
        if summary.short and report.settings.ignore_eos:
            yield f"{level}: {summary.short} ended before all tokens asked for"
        if summary.client_cpu > MAX_CLIENT_CPU:
            yield f"{level}: the load generator used {summary.client_cpu:.0%} of a core, doubt its times"


def to_json(report: Report, *, with_records: bool) -> dict[str, object]:
    """The report as JSON values, with every request of each level if `with_records`."""
    return {
        "settings": {name: value for name, value in asdict(report.settings).items() if name != "levels"},
        "date": report.date,
        "interrupted": report.interrupted,
        "levels": [_level(result, with_records) for result in report.results],
    }


def dump_line(values: dict[str, object]) -> str:
    return json.dumps(values, separators=(",", ":"), allow_nan=False, default=str)  # paths


def _format_number(value: float | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, int):
        return str(value)
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{digits}f}"


def _level(result: LevelResult, samples: bool) -> dict[str, object]:
    figures = {result.level.name: result.level.value} | asdict(result.summary())
    if samples:
        figures["samples"] = [_record(s, result.started) for s in result.records if s.status]
    return figures


def _record(sample: RequestRecord, start: float) -> dict[str, object]:
    times = {name: 1000 * seconds for name, seconds in request_times(sample).items()}
    return {
        "status": sample.status,
        "due_s": sample.scheduled_at - start,
        "input_tokens": sample.input_tokens,
        "output_tokens": sample.output_tokens,
        **{field: times.get(name) for name, field in TIMES.items()},
    }
