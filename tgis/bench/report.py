"""Formats a report: a table and notes for people, JSON for programs."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from tgis.bench.measure import LevelResult, Report
from tgis.bench.summary import request_times

MAX_CLIENT_CPU = 0.8  # share of a core; above it the load generator's own times are doubtful
MAX_DETAIL_CHARS = 200  # characters of an error message


def format_table(report: Report) -> str:
    """A title, then a column for each level and a row for each figure that any of them has."""
    settings, levels = report.settings, [_flat(_level(result)) for result in report.results]
    names = dict.fromkeys(name for level in levels for name, value in level.items() if value is not None)
    rows = {name: [_format_number(level.get(name)) for level in levels] for name in names}
    indent = max(map(len, rows), default=0)
    width = 2 + max((len(cell) for row in rows.values() for cell in row), default=0)
    title = f"{settings.target}, {'streamed' if settings.stream else 'unary'}"
    table = [f"{name:<{indent}}{''.join(cell.rjust(width) for cell in row)}" for name, row in rows.items()]
    return "\n".join([title, "", *table])


def format_notes(report: Report) -> Iterator[str]:
    """Remarks that a reader of the table needs."""
    if report.interrupted:
        yield "interrupted: requests that were under way are not counted"
    if not report.calibrated:
        yield "the server does not count tokens: input lengths are in words"
    for result in report.results:
        level, summary = f"{result.level.name} {result.level.value:g}", result.summary()
        for status, count in summary.failed.items():
            detail = next(record.detail for record in result.records if record.status == status)
            yield f"{level}: {count} failed with {status}, the first: {' '.join(detail.split())[:MAX_DETAIL_CHARS]}"
        if summary.client_cpu > MAX_CLIENT_CPU:
            yield f"{level}: the load generator used {summary.client_cpu:.0%} of a core, doubt its times"


def to_json(report: Report, *, with_records: bool) -> dict[str, object]:
    """The report as JSON values, with every request of each level if `with_records`."""
    levels = [_level(result) for result in report.results]
    if with_records:
        levels = [level | _records(result) for level, result in zip(levels, report.results, strict=True)]
    return {
        "settings": {name: value for name, value in asdict(report.settings).items() if name != "levels"},
        "date": report.date,
        "interrupted": report.interrupted,
        "levels": levels,
    }


def dump_line(values: dict[str, object]) -> str:
    return json.dumps(values, separators=(",", ":"), allow_nan=False, default=str)  # paths


def _level(result: LevelResult) -> dict[str, Any]:
    return {result.level.name: result.level.value} | asdict(result.summary())


def _flat(figures: Mapping[str, Any]) -> dict[str, float | None]:
    """Figures by name, those of nested objects by both names."""
    nested = {name: value if isinstance(value, dict) else {"": value} for name, value in figures.items()}
    return {f"{name} {key}".strip(): value for name, values in nested.items() for key, value in values.items()}


def _records(result: LevelResult) -> dict[str, object]:
    finished = [record for record in result.records if record.status]
    return {"requests": [asdict(record) | request_times(record) for record in finished]}


def _format_number(value: float | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.2f}"
