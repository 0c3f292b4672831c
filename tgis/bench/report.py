"""Formats a report: a table and notes for people, JSON for programs."""

import json
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TypeAlias

from tgis.bench.client import RequestRecord
from tgis.bench.measure import LevelResult, Report
from tgis.bench.summary import Percentiles, Summary, request_times

MAX_COLUMNS = 80
MAX_CLIENT_CPU = 0.8  # share of a core; above it the load generator's own times are doubtful
MAX_DETAIL_CHARS = 200  # characters of an error message
TIMES = {"ttft": "ttft_ms", "tpot": "tpot_ms", "gap": "max_gap_ms", "latency": "latency_ms"}

_Group: TypeAlias = tuple[str, list[list[str]]]  # a title, and columns below it


def format_table(report: Report) -> str:
    """A title, then throughput and times, each a row per level and columns in groups."""
    settings, summaries = report.settings, [result.summary() for result in report.results]
    load = settings.levels[0].name
    levels = "", [[load, *(f"{result.level.value:g}" for result in report.results)]]
    requests = {"ok": "ok", "failed": "num_failed", "good": "good", "/s": "requests_per_s", "good/s": "goodput_per_s"}
    if settings.slo is None:
        del requests["good"], requests["good/s"]
    tokens = {"in": "input_tokens_per_s", "out": "output_tokens_per_s"}
    throughput = [("requests", _columns(requests, summaries)), ("tokens/s", _columns(tokens, summaries))]
    if settings.server_pid is not None:
        throughput.append(("server CPU", _columns({"us/token": "server_cpu_us_per_token"}, summaries)))
    if settings.metrics is not None:
        ahead = {"proposed": "proposed_tokens", "kept": "accepted_tokens", "per step": "tokens_per_proposal"}
        throughput.append(("tokens ahead", _columns(ahead, summaries)))
    percentiles = {name: name for name in ("p50", "p90", "p99")}
    times = [
        (f"{name}, ms", _columns(percentiles, [getattr(summary, field) for summary in summaries]))
        for name, field in TIMES.items()
    ]
    api = "" if settings.api == "grpc" else f", {settings.api}{' chats' if settings.chat else ''}"
    title = f"{settings.target}{api}, {'streamed' if settings.stream else 'unary'}"
    objectives = ", ".join(f"{name} at most {most:g} ms" for name, most in (settings.slo or {}).items())
    lines = [*textwrap.wrap(title, MAX_COLUMNS), *textwrap.wrap(objectives and f"good: {objectives}", MAX_COLUMNS)]
    return "\n\n".join(["\n".join(lines), *_tables(levels, throughput), *_tables(levels, times)])


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
        if summary.counted_by_events:
            yield f"{level}: the server does not say how many tokens it generates: messages are counted"
        if summary.client_cpu > MAX_CLIENT_CPU:
            yield f"{level}: the load generator used {summary.client_cpu:.0%} of a core, doubt its times"


def to_json(report: Report, *, with_records: bool) -> dict[str, object]:
    """The report as JSON values, with every request of each level if `with_records`."""
    return {
        "settings": {name: value for name, value in asdict(report.settings).items() if name != "levels"},
        "model": report.model,
        "date": report.date,
        "interrupted": report.interrupted,
        "levels": [_level(result, with_records) for result in report.results],
    }


def dump_line(values: dict[str, object]) -> str:
    return json.dumps(values, separators=(",", ":"), allow_nan=False, default=str)  # paths


def _columns(fields: dict[str, str], values: Sequence[Summary | Percentiles]) -> list[list[str]]:
    """A column for each field, below its name."""
    return [[name, *(_format_number(getattr(value, field)) for value in values)] for name, field in fields.items()]


def _tables(levels: _Group, groups: list[_Group]) -> list[str]:
    """One table, or several where it would be too wide."""
    table = _grouped([levels, *groups])
    if len(groups) == 1 or table.index("\n") <= MAX_COLUMNS:
        return [table]
    half = (len(groups) + 1) // 2
    return [*_tables(levels, groups[:half]), *_tables(levels, groups[half:])]


def _grouped(groups: list[_Group]) -> str:
    """The columns side by side, below the titles of their groups."""
    lines = zip(*(_group_lines(title, columns) for title, columns in groups), strict=True)
    return "\n".join("   ".join(parts) for parts in lines)


def _group_lines(title: str, columns: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in columns]
    lines = [" ".join(map(str.rjust, row, widths)) for row in zip(*columns, strict=True)]
    width = max(len(title) + 4 if title else 0, len(lines[0]))
    return [f" {title} ".center(width, "-") if title else " " * width, *(line.rjust(width) for line in lines)]


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
