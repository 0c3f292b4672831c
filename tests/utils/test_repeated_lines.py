"""tgis.utils.repeated_lines: which of many equal log lines are written, and that each is counted."""

import logging
import random

import pytest

from tgis.utils.repeated_lines import MAX_LINES, REPEAT_SECONDS, RepeatedLines


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("x", logging.ERROR, "", 0, "no %s", (text,), None)


def log(lines: RepeatedLines, text: str, now: float) -> list[tuple[str, int]]:
    """What a logger that writes each line once would write, with the number of repeats."""
    written = [(due.getMessage(), count) for due, count in lines.due(now)]
    return written if lines.is_repeat(record(text), text, now) else [*written, (f"no {text}", 0)]


def test_a_line_is_written_once_in_ten_seconds_and_then_with_its_number() -> None:
    lines = RepeatedLines()
    assert log(lines, "a", 0.0) == [("no a", 0)]
    assert [log(lines, "a", second) for second in (1.0, 5.0, 9.9)] == [[], [], []]
    assert log(lines, "b", 9.9) == [("no b", 0)]
    assert log(lines, "b", 10.0) == [("no a", 3)]
    assert log(lines, "a", 19.0) == []
    assert log(lines, "c", 20.0) == [("no b", 1), ("no a", 1), ("no c", 0)]
    assert log(lines, "a", 100.0) == [("no a", 0)]  # not repeated for ten seconds: as new


@pytest.mark.parametrize("seed", range(20))
def test_every_line_is_written_or_counted(seed: int) -> None:
    rng, lines, now = random.Random(seed), RepeatedLines(), 0.0
    logged, written = 0, []
    for _ in range(2000):
        now += rng.choice([0.0, 0.1, 1.0, 20.0])
        written += log(lines, rng.choice("abcdef"), now)
        logged += 1
    written += [(due.getMessage(), count) for due, count in lines.due(now + REPEAT_SECONDS)]
    assert sum(count or 1 for _, count in written) == logged


def test_memory_is_bounded() -> None:
    lines = RepeatedLines()
    for number in range(2 * MAX_LINES):
        assert log(lines, str(number), 0.0) == [(f"no {number}", 0)]
    assert log(lines, "0", 0.0) == []
    assert log(lines, str(MAX_LINES), 0.0) != []  # not remembered, so not held back either
