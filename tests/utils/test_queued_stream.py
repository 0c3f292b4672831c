"""QueuedStream: what it writes when, and that no writer waits for a reader."""

import os
from collections.abc import Iterator
from typing import BinaryIO

import pytest

from tgis.utils import queued_stream
from tgis.utils.queued_stream import MAX_QUEUED, QueuedStream


@pytest.fixture
def pipe() -> Iterator[tuple[BinaryIO, int]]:
    """Its reading end and the descriptor of its writing end."""
    reading, writing = os.pipe()
    with open(reading, "rb", buffering=0) as reader:
        yield reader, writing
    os.close(writing)


def line(number: int) -> bytes:
    return b"%06d%s\n" % (number, b"." * 250)


def log(lines: QueuedStream, *numbers: int) -> None:
    for number in numbers:
        lines.write(line(number).decode())


def read_until(reader: BinaryIO, end: bytes) -> list[bytes]:
    data = b""
    while not data.endswith(end):
        data += reader.read(1 << 16)
    return data.splitlines(keepends=True)


def test_what_nobody_reads_is_dropped_and_counted_until_it_flows_again(pipe: tuple[BinaryIO, int]) -> None:
    reading, writing = pipe
    lines = QueuedStream(writing)
    total = 3 * MAX_QUEUED
    log(lines, *range(total))
    num_dropped = lines.num_dropped
    assert num_dropped > MAX_QUEUED
    written = [reading.read(len(line(0))) for _ in range(total - num_dropped)]
    assert written == sorted(set(written) & set(map(line, range(total))))
    log(lines, total)
    assert read_until(reading, b"\n") == [line(total)]
    assert lines.num_dropped == num_dropped
    lines.stop()


def test_stop_waits_for_lines_but_not_for_ever(pipe: tuple[BinaryIO, int], monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = pipe
    lines = QueuedStream(writing)
    log(lines, *range(100))
    lines.stop()
    assert read_until(reading, line(99)) == [*map(line, range(100))]
    stuck = QueuedStream(writing)
    log(stuck, *range(1000))
    with monkeypatch.context() as patch:
        patch.setattr(queued_stream, "STOP_SECONDS", 0.01)
        stuck.stop()
    assert read_until(reading, line(999)) == [line(number) for number in range(1000)]
    stuck.close()  # waits for the thread, which would write to whatever has the descriptor next


def test_lines_that_cannot_be_written_are_counted(pipe: tuple[BinaryIO, int]) -> None:
    reading, writing = pipe
    reading.close()
    lines = QueuedStream(writing)
    log(lines, *range(10))
    lines.stop()
    assert lines.num_dropped == 10
