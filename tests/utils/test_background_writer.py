"""tgis.utils.background_writer: what it writes when, and that it never waits for a reader."""

import os
from collections.abc import Iterator
from typing import BinaryIO

import pytest

from tgis.utils import background_writer
from tgis.utils.background_writer import MAX_QUEUED, BackgroundWriter


@pytest.fixture
def pipe() -> Iterator[tuple[BinaryIO, int]]:
    """Its reading end and the descriptor of its writing end."""
    reading, writing = os.pipe()
    with open(reading, "rb", buffering=0) as reader:
        yield reader, writing
    os.close(writing)


def line(number: int) -> bytes:
    return b"%06d%s\n" % (number, b"." * 250)


def read_until(reader: BinaryIO, end: bytes) -> list[bytes]:
    data = b""
    while not data.endswith(end):
        data += reader.read(1 << 16)
    return data.splitlines(keepends=True)


def test_what_nobody_reads_is_dropped_and_reported_once_it_flows_again(pipe: tuple[BinaryIO, int]) -> None:
    reading, writing = pipe
    writer = BackgroundWriter(writing, b"dropped %d\n".__mod__)
    total = 3 * MAX_QUEUED
    for number in range(total):
        writer.put(line(number))
    num_dropped = writer.num_dropped
    assert num_dropped > MAX_QUEUED
    assert read_until(reading, b"dropped %d\n" % num_dropped)[:-1] == [line(n) for n in range(total - num_dropped)]
    writer.put(b"later\n")
    assert read_until(reading, b"later\n") == [b"later\n"]
    assert writer.num_dropped == num_dropped
    writer.close()


def test_the_end_waits_for_lines_but_not_for_ever(pipe: tuple[BinaryIO, int], monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = pipe
    writer = BackgroundWriter(writing, bytes)
    for number in range(100):
        writer.put(line(number))
    writer.close()
    assert reading.read(1 << 16) == b"".join(map(line, range(100)))
    monkeypatch.setattr(background_writer, "EXIT_SECONDS", 0.01)
    stuck = BackgroundWriter(writing, bytes)
    for number in range(1000):
        stuck.put(line(number))
    stuck.close()
    assert len(reading.read(1 << 20)) > 1000  # what was written before; and frees the thread


def test_lines_that_cannot_be_written_are_counted(pipe: tuple[BinaryIO, int]) -> None:
    reading, writing = pipe
    reading.close()
    writer = BackgroundWriter(writing, b"dropped %d\n".__mod__)
    for number in range(10):
        writer.put(line(number))
    writer.close()
    assert writer.num_dropped == 10
