"""Log output: one line per record whatever it contains, as text or JSON, with the correlation id; no writer waits."""

import asyncio
import contextvars
import json
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import pytest

from tgis.utils import logs, queued_stream
from tgis.utils.queued_stream import MAX_QUEUED, QueuedStream

pytestmark = pytest.mark.usefixtures("logging_as_before")

Lines = Callable[[], list[str]]


@pytest.fixture
def lines(capfd: pytest.CaptureFixture[str]) -> Lines:
    """Ends the logging, and returns all lines since the last time."""

    def read() -> list[str]:
        logs.stop()
        return capfd.readouterr().out.splitlines()

    return read


def test_a_text_line(lines: Lines) -> None:
    logs.configure(level="info", json_output=False)
    assert [stream.fileno() for stream in logs._streams] == [1, 2]
    extra = {"rows": 0, "model": "a b", "pair": "a=b", "empty": ""}
    logging.getLogger("tgis.x").info("took %d ms\n", 3, extra=extra)
    time, _, rest = lines()[0].partition(" ")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", time)
    assert rest == r"INFO    tgis.x: took 3 ms\n rows=0 model='a b' pair='a=b' empty=''"


def test_a_json_line(lines: Lines) -> None:
    logs.configure(level="info", json_output=True, process="engine")
    extra = {"rows": 2, "rate": float("nan"), "limit": float("inf"), "path": Path("/a"), "level": "forged"}
    logging.getLogger("tgis.x").warning("über %s", "é\ud800", extra=extra)
    line = json.loads(lines()[0], parse_constant=pytest.fail)
    assert line.pop("time").endswith("Z")
    expected = {"level": "WARNING", "logger": "tgis.x", "message": "über é\ud800", "process": "engine"}
    assert line == expected | {"rows": 2, "rate": "nan", "limit": "inf", "path": "/a"}


@pytest.mark.parametrize("json_output", [False, True])
def test_hostile_text_stays_on_one_line(lines: Lines, json_output: bool) -> None:
    logs.configure(level="info", json_output=json_output)
    hostile = "a\nINFO forged\r\x1b[2J\u2028\x00\udcff"
    with logs.correlation_scope(hostile + "x" * 100_000):
        logging.getLogger("tgis").info(hostile, extra={"fact": hostile})
    (line,) = lines()
    assert (line.isprintable(), "forged" in line, len(line) < 1000) == (True, True, True)
    assert logs.correlation_id() is None


def test_a_correlation_id_belongs_to_its_task(lines: Lines) -> None:
    logs.configure(level="info", json_output=True)

    async def call(name: str | None) -> None:
        with logs.correlation_scope(name):
            await asyncio.sleep(0)
            logging.getLogger("tgis").info("of %s", name)

    async def calls() -> None:
        await asyncio.gather(call("a"), call(None))

    contextvars.copy_context().run(asyncio.run, calls())
    found = {(line["message"], line.get("correlation_id")) for line in map(json.loads, lines())}
    assert found == {("of a", "a"), ("of None", None)}


def test_a_traceback_is_indented_text_or_one_field(lines: Lines) -> None:
    error = ValueError("why\nnot")
    logs.configure(level="info", json_output=False)
    logging.getLogger("tgis").error("broken", exc_info=error)
    first, *rest = lines()
    assert first.endswith("ERROR   tgis: broken")
    assert rest
    assert all(line.startswith("  ") for line in rest)
    logs.configure(level="info", json_output=True)
    logging.getLogger("tgis").error("broken", exc_info=error)
    assert "ValueError: why\nnot" in json.loads(lines()[0])["exception"]


@pytest.mark.parametrize(
    ("level", "heard"),
    [
        ("debug", "debug info error critical"),
        ("warn", "error critical"),
        ("ERROR", "error critical"),
        ("off", ""),
        ("info,tower=warn", "info error critical"),  # unknown
    ],
)
def test_levels(lines: Lines, level: str, heard: str) -> None:
    logs.configure(level=level, json_output=False)
    for name in ("debug", "info", "error", "critical"):
        logging.getLogger("tgis.x").log(logs.LEVELS[name], name)
    assert " ".join(line.rpartition(" ")[2] for line in lines()) == heard


def test_libraries_log_from_warning_up(lines: Lines) -> None:
    logs.configure(level="debug", json_output=False)
    logging.getLogger("grpc").info("hidden")
    logging.getLogger("grpc").warning("shown")
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        logging.captureWarnings(True)
        warnings.warn("noticed", stacklevel=1)
    first, second = lines()
    assert first.endswith("WARNING grpc: shown")
    assert "py.warnings" in second
    assert "noticed" in second


def test_stderr_is_written_in_order_and_in_full(capfd: pytest.CaptureFixture[str]) -> None:
    logs.configure(level="info", json_output=False)
    print("one", "\ud800", file=sys.stderr, flush=True)
    print("two", file=sys.stderr)
    logs.stop()
    assert capfd.readouterr().err == "one \\ud800\ntwo\n"
    assert not any(stream._thread.is_alive() for stream in logs._streams)
    logs._streams[0].num_dropped, logs._streams[1].num_dropped = 2, 3
    assert logs.num_dropped_lines() == 5


def test_the_termination_log_is_written_only_if_it_exists(tmp_path: Path) -> None:
    path = tmp_path / "termination-log"
    logs.write_termination_message(path, "no model")
    assert not path.exists()
    path.write_text("an old and longer reason\n")
    logs.write_termination_message(path, "no token \ud800")  # it may quote a model's JSON
    assert path.read_text() == "no token \\ud800\n"
    logs.write_termination_message(tmp_path, "a directory does no harm")


def test_sizes_have_three_digits() -> None:
    shown = [logs.format_bytes(size) for size in (0, 999, 1000, 1536, 5 << 20, 1 << 40)]
    assert shown == ["0 bytes", "999 bytes", "0.977 KiB", "1.5 KiB", "5 MiB", "1.02e+03 GiB"]


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
