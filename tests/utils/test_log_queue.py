"""tgis.utils.log_queue: what is written when, that nobody waits for a reader, and that repeated lines are counted."""

import logging
import os
from collections.abc import Iterator
from typing import BinaryIO

import pytest

from tgis.utils import log_queue
from tgis.utils.log_queue import MAX_LINES, MAX_QUEUED, LineQueue, RepeatedLines


@pytest.fixture
def pipe() -> Iterator[tuple[BinaryIO, int]]:
    """Its reading end and the descriptor of its writing end."""
    reading, writing = os.pipe()
    with open(reading, "rb", buffering=0) as reader:
        yield reader, writing
    os.close(writing)


def line(number: int) -> bytes:
    return b"%06d%s\n" % (number, b"." * 250)


def log(lines: LineQueue, *numbers: int) -> None:
    for number in numbers:
        lines.handle(logging.makeLogRecord({"msg": line(number).decode().strip()}))


def read_until(reader: BinaryIO, end: bytes) -> list[bytes]:
    data = b""
    while not data.endswith(end):
        data += reader.read(1 << 16)
    return data.splitlines(keepends=True)


def test_what_nobody_reads_is_dropped_and_counted_until_it_flows_again(pipe: tuple[BinaryIO, int]) -> None:
    reading, writing = pipe
    lines = LineQueue(writing)
    total = 3 * MAX_QUEUED
    log(lines, *range(total))
    num_dropped = lines.num_dropped
    assert num_dropped > MAX_QUEUED
    written = [reading.read(len(line(0))) for _ in range(total - num_dropped)]
    assert written == sorted(set(written) & set(map(line, range(total))))
    log(lines, total)
    assert read_until(reading, b"\n") == [line(total)]
    assert lines.num_dropped == num_dropped
    lines.close()


def test_the_end_waits_for_lines_but_not_for_ever(pipe: tuple[BinaryIO, int], monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = pipe
    lines = LineQueue(writing)
    log(lines, *range(100))
    lines.close()
    assert read_until(reading, line(99)) == [*map(line, range(100))]
    stuck = LineQueue(writing)
    log(stuck, *range(1000))
    with monkeypatch.context() as patch:
        patch.setattr(log_queue, "EXIT_SECONDS", 0.01)
        stuck.close()
    assert read_until(reading, line(999)) == [line(number) for number in range(1000)]
    stuck.close()  # waits for the thread, which would write to whatever has the descriptor next


def test_lines_that_cannot_be_written_are_counted(pipe: tuple[BinaryIO, int]) -> None:
    reading, writing = pipe
    reading.close()
    lines = LineQueue(writing)
    log(lines, *range(10))
    lines.close()
    assert lines.num_dropped == 10


def test_a_line_is_written_once_in_ten_seconds_and_then_with_its_number() -> None:
    lines = RepeatedLines()
    assert lines.repeats("a", 100.0) == 0
    assert [lines.repeats("a", second) for second in (101.0, 105.0, 109.9)] == [None] * 3
    assert lines.repeats("b", 109.9) == 0
    assert lines.repeats("a", 110.0) == 3
    assert [lines.repeats(name, 119.0) for name in "ab"] == [None] * 2
    assert lines.repeats("b", 120.0) == 1
    assert lines.repeats("a", 200.0) == 1
    assert lines.repeats("a", 300.0) == 0


def test_memory_is_bounded() -> None:
    lines = RepeatedLines()
    for number in range(2 * MAX_LINES):
        assert lines.repeats(str(number), 0.0) == 0
    assert lines.repeats("0", 0.0) == 0  # forgotten, so not held back
    assert lines.repeats("0", 0.0) is None
