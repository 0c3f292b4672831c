"""Logging of all processes: text or JSON on stdout, one line per record, with the correlation id.

A process never waits for the reader of its stdout or stderr. The text of requests and outputs must never be logged,
unless LOG_TEXT is on.
"""

import atexit
import contextlib
import json
import logging
import math
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tgis.utils.queued_stream import QueuedStream

_NAMES = {name.lower(): level for name, level in logging.getLevelNamesMapping().items()}
LEVELS = _NAMES | {"trace": logging.DEBUG, "off": logging.CRITICAL + 1}
_UNITS = ("bytes", "KiB", "MiB", "GiB")
MAX_ID_LENGTH = 128

_streams: list[QueuedStream] = []

_correlation_id: ContextVar[str | None] = ContextVar("correlation_id", default=None)
_RECORD_ATTRIBUTES = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def configure(*, level: str, json_output: bool, process: str | None = None) -> None:
    """Log to stdout; `process` names the process in every line, unless it is the front end.

    `level` applies to tgis, an unknown one means info; libraries log from WARNING up.
    """
    stdout, stderr = _streams[:] = QueuedStream(1), QueuedStream(2)
    atexit.register(stop)
    sys.stderr = stderr
    handler = logging.StreamHandler(stdout)
    handler.setFormatter((JsonFormatter if json_output else TextFormatter)(process))
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.captureWarnings(True)
    for name in ("tgis", "__main__"):
        logging.getLogger(name).setLevel(LEVELS.get(level.lower(), logging.INFO))


def stop() -> None:
    """Write the lines of this process that are queued, for a second or two at most; later ones are lost."""
    for stream in _streams:
        stream.stop()


def num_dropped_lines() -> int:
    """Lines of this process that were dropped because they were not read in time or could not be written."""
    return sum(stream.num_dropped for stream in _streams)


@contextlib.contextmanager
def correlation_scope(correlation_id: str | None) -> Iterator[None]:
    """Adds the id to every line logged in the block and in tasks started there."""
    token = _correlation_id.set(correlation_id[:MAX_ID_LENGTH] if correlation_id else None)
    try:
        yield
    finally:
        _correlation_id.reset(token)


def correlation_id() -> str | None:
    """The id that lines logged here have."""
    return _correlation_id.get()


def write_termination_message(path: Path, reason: str) -> None:
    """Write the reason of a fatal error to the termination log, if Kubernetes has created one."""
    with contextlib.suppress(OSError), path.open("r+", errors="backslashreplace") as file:  # does not create it
        file.truncate()
        file.write(reason + "\n")


class TextFormatter(logging.Formatter):
    """Formats records for people: time, level, logger, message, fields."""

    def __init__(self, process: str | None) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        fields = [f"{name}={_quote(str(value))}" for name, value in _fields(record, self._process).items()]
        message = " ".join([escape(record.getMessage()), *fields])
        line = f"{_timestamp(record)} {record.levelname:<7} {record.name}: {message}"
        if record.exc_info:  # indented, so that its text cannot be mistaken for a log line
            line += "".join(f"\n  {escape(row)}" for row in self.formatException(record.exc_info).splitlines())
        return line


class JsonFormatter(TextFormatter):
    """Formats records as JSON objects."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _timestamp(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        fields = {name: _json_value(value) for name, value in _fields(record, self._process).items()}
        return json.dumps(line | fields | line, default=str)


def _timestamp(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _fields(record: logging.LogRecord, process: str | None) -> dict[str, Any]:
    """The fields of a record: process, correlation id and the caller's `extra`."""
    extra = {name: value for name, value in vars(record).items() if name not in _RECORD_ATTRIBUTES}
    fields = {"process": process, "correlation_id": _correlation_id.get(), **extra}
    return {name: value for name, value in fields.items() if value is not None}


def _quote(text: str) -> str:
    return text if text.isprintable() and text and not set(text) & set(" =\"'") else repr(text)


def escape(text: str) -> str:
    """The text on one line, whatever a client has put into it."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def _json_value(value: Any) -> Any:
    """JSON has no NaN."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def format_bytes(size: float) -> str:
    """Bytes in binary units, with three digits."""
    power = 0
    while size >= 1000 and power < len(_UNITS) - 1:
        size, power = size / 1024, power + 1
    return f"{size:.3g} {_UNITS[power]}"
