"""A report as an SVG: time to first token and time per token at each level, with the model and the date."""

import math
from collections.abc import Iterator, Sequence
from html import escape

from tgis.bench.measure import Report

_WIDTH, _HEIGHT = 330, 210  # of a panel
_LEFT, _TOP, _BESIDE = 60, 70, 400  # of the first one, and to the second
_COLORS = {"p50": "#0b5f78", "p90": "#b26a00", "p99": "#b3261e"}
_PANELS = {"ttft_ms": "Time to first token, ms", "tpot_ms": "Time per token, ms"}
_TICKS = 4


def to_svg(report: Report) -> str:
    """Two panels, with a line for each percentile."""
    title = f"{report.model or report.settings.target}, {report.date}"
    panels = [
        "".join(_panel(report, field, name, _LEFT + index * _BESIDE))
        for index, (field, name) in enumerate(_PANELS.items())
    ]
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" width="810" height="340" font-family="sans-serif" font-size="12">'
        f'<rect width="100%" height="100%" fill="#fff"/>{_text(_LEFT, 26, title, "start", 15)}{"".join(panels)}</svg>\n'
    )


def _panel(report: Report, field: str, name: str, left: int) -> Iterator[str]:
    values = [getattr(result.summary(), field) for result in report.results]
    highest = _round_up(max((value.p99 or 0.0 for value in values), default=0.0))
    bottom = _TOP + _HEIGHT
    yield _text(left, _TOP - 14, name, "start")
    for tick in range(_TICKS + 1):
        y = bottom - tick * _HEIGHT / _TICKS
        yield f'<path d="M{left} {y}h{_WIDTH}" stroke="#ddd"/>'
        yield _text(left - 6, y + 4, f"{highest * tick / _TICKS:g}", "end")
    xs = [left + (index + 0.5) * _WIDTH / len(values) for index in range(len(values))]
    for x, result in zip(xs, report.results, strict=True):
        yield _text(x, bottom + 18, f"{result.level.value:g}")
    yield _text(left + _WIDTH / 2, bottom + 38, report.settings.levels[0].name)
    for index, (percentile, color) in enumerate(_COLORS.items()):
        heights = [getattr(value, percentile) for value in values]
        points = [(x, bottom - y / highest * _HEIGHT) for x, y in zip(xs, heights, strict=True) if y is not None]
        yield _line(points, color)
        yield _text(left + _WIDTH - 70 + 35 * index, _TOP - 14, percentile, color=color)


def _line(points: Sequence[tuple[float, float]], color: str) -> str:
    dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in points)
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>{dots}'


def _text(x: float, y: float, text: str, anchor: str = "middle", size: int = 12, color: str = "#222") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}" fill="{color}">{escape(text)}</text>'


def _round_up(value: float) -> float:
    """Round up to 1, 2, 4 or 10 times a power of ten, whose quarters have few digits."""
    power = 10.0 ** math.floor(math.log10(value)) if value else 1.0
    return next(step * power for step in (1, 2, 4, 10, 20) if step * power >= value)
