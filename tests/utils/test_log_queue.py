"""tgis.utils.log_queue: what is written when, that nobody waits for a reader, and that repeated lines are counted."""

import logging
import os
import random
from collections.abc import Iterator
from typing import BinaryIO

import pytest

from tgis.utils import log_queue
from tgis.utils.log_queue import MAX_LINES, MAX_QUEUED, REPEAT_SECONDS, LineQueue, RepeatedLines


@pytest.fixture
def pipe() -> Iterator[tuple[BinaryIO, int]]:
    """Its reading end and the descriptor of its writing end."""
    reading, writing = os.pipe()
    with open(reading, "rb", buffering=0) as reader:
        yield reader, writing
    os.close(writing)


def line(number: int) -> bytes:
    return b"%06d%s\n" % (number, b"." * 250)


def log(lines: LineQueue, number: int) -> None:
    lines.handle(logging.makeLogRecord({"msg": line(number).decode().strip()}))


def read_until(reader: BinaryIO, end: bytes) -> list[bytes]:
    data = b""
    while not data.endswith(end):
        data += reader.read(1 << 16)
    return data.splitlines(keepends=True)


def test_what_nobody_reads_is_dropped_and_reported_once_it_flows_again(
    pipe: tuple[BinaryIO, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, writing = pipe
    lines = LineQueue(writing)
    monkeypatch.setattr(logging.getLogger(log_queue.__name__), "handlers", [lines])
    total = 3 * MAX_QUEUED
    for number in range(total):
        log(lines, number)
    num_dropped = lines.num_dropped
    assert num_dropped > MAX_QUEUED
    report = b"%d lines were dropped: they came faster than they were read\n" % num_dropped
    assert read_until(reading, report)[:-1] == [line(n) for n in range(total - num_dropped)]
    log(lines, total)
    assert read_until(reading, b"\n") == [line(total)]
    assert lines.num_dropped == num_dropped
    lines.close()


def test_the_end_waits_for_lines_but_not_for_ever(pipe: tuple[BinaryIO, int], monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = pipe
    lines = LineQueue(writing)
    for number in range(100):
        log(lines, number)
    lines.close()
    assert reading.read(1 << 16) == b"".join(map(line, range(100)))
    monkeypatch.setattr(log_queue, "EXIT_SECONDS", 0.01)
    stuck = LineQueue(writing)
    for number in range(1000):
        log(stuck, number)
    stuck.close()
    assert len(reading.read(1 << 20)) > 1000  # what was written before; and frees the thread


def test_lines_that_cannot_be_written_are_counted(pipe: tuple[BinaryIO, int]) -> None:
    reading, writing = pipe
    reading.close()
    lines = LineQueue(writing)
    for number in range(10):
        log(lines, number)
    lines.close()
    assert lines.num_dropped == 10


def repeat(lines: RepeatedLines, text: str, now: float) -> list[tuple[str, int]]:
    """What a logger that writes each line once would write, with the number of repeats."""
    record = logging.LogRecord("x", logging.ERROR, "", 0, "no %s", (text,), None)
    written = [(due.getMessage(), vars(due)["repeated"]) for due in lines.due(now)]
    return written if lines.is_repeat(record, text) else [*written, (f"no {text}", 0)]


def test_a_line_is_written_once_in_ten_seconds_and_then_with_its_number() -> None:
    lines = RepeatedLines()
    assert repeat(lines, "a", 100.0) == [("no a", 0)]
    assert [repeat(lines, "a", second) for second in (101.0, 105.0, 109.9)] == [[], [], []]
    assert repeat(lines, "b", 109.9) == [("no b", 0)]
    assert repeat(lines, "b", 110.0) == [("no a", 3), ("no b", 0)]
    assert [repeat(lines, name, 119.0) for name in "ab"] == [[], []]
    assert repeat(lines, "c", 120.0) == [("no a", 1), ("no b", 1), ("no c", 0)]
    assert repeat(lines, "a", 200.0) == [("no a", 0)]  # not repeated for ten seconds: as new


@pytest.mark.parametrize("seed", range(5))
def test_every_line_is_written_or_counted(seed: int) -> None:
    rng, lines, now = random.Random(seed), RepeatedLines(), 0.0
    logged, written = 0, []
    for _ in range(2000):
        now += rng.choice([0.0, 0.1, 1.0, 20.0])
        written += repeat(lines, rng.choice("abcdef"), now)
        logged += 1
    written += [(due.getMessage(), vars(due)["repeated"]) for due in lines.due(now + REPEAT_SECONDS)]
    assert sum(count or 1 for _, count in written) == logged


def test_memory_is_bounded() -> None:
    lines = RepeatedLines()
    for number in range(2 * MAX_LINES):
        assert repeat(lines, str(number), 0.0) == [(f"no {number}", 0)]
    assert repeat(lines, "0", 0.0) == []
    assert repeat(lines, str(MAX_LINES), 0.0) != []  # not remembered, so not held back either
