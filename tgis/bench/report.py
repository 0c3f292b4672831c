"""Formats a report: a table and notes for people, JSON for programs."""

import json
from collections.abc import Iterator
from dataclasses import asdict

from tgis.bench.client import RequestRecord
from tgis.bench.measure import LevelResult, Report
from tgis.bench.summary import Percentiles, time_per_output_token
from tgis.pb import generation_pb2 as pb

MAX_CLIENT_CPU = 0.8  # share of a core; above it the load generator's own times are doubtful
MAX_DETAIL_CHARS = 200  # characters of an error message
TIMES = {"ttft": "ttft_ms", "tpot": "tpot_ms", "gap": "max_gap_ms", "latency": "latency_ms"}


def format_table(report: Report) -> str:
    """A title, and one row per level."""
    settings = report.settings
    level = settings.levels[0].name if settings.levels else ""
    times = [cell for name in TIMES for cell in (f"{name} p50", "p90", "p99")]
    rows = [[level, "ok", "failed", "req/s", "in tok/s", "out tok/s", *times]]
    rows += [_row(result) for result in report.results]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.rjust, row, widths)) for row in rows]
    kind = "streamed" if settings.stream else "unary"
    return "\n".join([f"{settings.target}, {kind}; times in milliseconds", *lines])


def format_notes(report: Report) -> Iterator[str]:
    """What to know when reading the table."""
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
    model = report.model
    return {
        "settings": _settings(report),
        "model": {
            "kind": pb.ModelInfoResponse.ModelKind.Name(model.model_kind),
            "max_sequence_length": model.max_sequence_length,
            "max_new_tokens": model.max_new_tokens,
        },
        "interrupted": report.interrupted,
        "levels": [_level(result, with_records) for result in report.results],
    }


def dump_line(values: dict[str, object]) -> str:
    return json.dumps(_rounded(values), separators=(",", ":"), allow_nan=False)


def _row(result: LevelResult) -> list[str]:
    summary = result.summary()
    rates = (summary.requests_per_s, summary.input_tokens_per_s, summary.output_tokens_per_s)
    groups: list[Percentiles] = [getattr(summary, name) for name in TIMES.values()]
    values = [*rates, *(value for group in groups for value in (group.p50, group.p90, group.p99))]
    counts = [summary.ok, sum(summary.failed.values())]
    return [f"{result.level.value:g}", *map(str, counts), *map(_format_number, values)]


def _format_number(value: float | None) -> str:
    if value is None:
        return "-"
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{digits}f}"


def _settings(report: Report) -> dict[str, object]:
    values = asdict(report.settings)
    del values["levels"]
    return values | {"prompts": str(values["prompts"]) if values["prompts"] else None}


def _level(result: LevelResult, samples: bool) -> dict[str, object]:
    figures = {result.level.name: result.level.value} | asdict(result.summary())
    if samples:
        figures["samples"] = [_record(s, result.started) for s in result.records if s.status]
    return figures


def _record(sample: RequestRecord, start: float) -> dict[str, object]:
    gap, streamed = time_per_output_token(sample), bool(sample.first_output_at)
    return {
        "status": sample.status,
        "due_s": sample.scheduled_at - start,
        "input_tokens": sample.input_tokens,
        "output_tokens": sample.output_tokens,
        "ttft_ms": 1000 * (sample.first_output_at - sample.scheduled_at) if streamed else None,
        "tpot_ms": None if gap is None else 1000 * gap,
        "max_gap_ms": 1000 * sample.max_gap if streamed else None,
        "latency_ms": 1000 * (sample.ended_at - sample.scheduled_at),
    }


def _rounded(value: object) -> object:
    """Floats rounded to six decimals: the rest is noise."""
    match value:
        case float():
            return round(value, 6)
        case dict():
            return {key: _rounded(member) for key, member in value.items()}
        case list() | tuple():
            return [_rounded(member) for member in value]
        case _:
            return value
