"""Logging of all processes: text or JSON on stdout, one line per record, with the correlation id.

No line makes its process wait, whoever reads stdout. The text of requests and outputs must never be logged, unless
LOG_TEXT is on.
"""

import contextlib
import io
import json
import logging
import math
import sys
import time
from collections.abc import Iterator
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tgis.utils.background_writer import BackgroundStream, BackgroundWriter
from tgis.utils.repeated_lines import RepeatedLines

LEVELS = {
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
    "off": logging.CRITICAL + 1,
}
MAX_ID_LENGTH = 128  # of a correlation id, which comes from the client
_STDOUT, _STDERR = 1, 2

_correlation_id: ContextVar[str | None] = ContextVar("correlation_id", default=None)
_RECORD_ATTRIBUTES = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def configure(*, level: str, json_output: bool, process: str | None = None) -> None:
    """Log to stdout; `process` names the process in every line, unless it is the front end.

    `level` applies to tgis, an unknown one means info; libraries log from WARNING up. What Python and libraries write
    to stderr makes nobody wait either.
    """
    handler = _Handler(_JsonFormatter(process) if json_output else _TextFormatter(process))
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.captureWarnings(True)
    sys.stderr = io.TextIOWrapper(
        BackgroundStream(handler.stderr, _STDERR), errors="backslashreplace", write_through=True
    )
    for name in ("tgis", "__main__"):  # of a module run as a script
        logging.getLogger(name).setLevel(LEVELS.get(level.lower(), logging.INFO))


def num_dropped_lines() -> int:
    """Lines of this process that did not fit into the queue, because nobody read them, or that could not be written."""
    return sum(handler.num_dropped for handler in logging.getLogger().handlers if isinstance(handler, _Handler))


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


class _Handler(logging.Handler):
    """Formats a record where it is logged; the interpreter closes it at exit."""

    def __init__(self, formatter: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self._stdout = BackgroundWriter(_STDOUT, self._dropped_line)
        self.stderr = BackgroundWriter(_STDERR, lambda count: b"tgis: %d lines were dropped\n" % count)
        self._repeated_lines = RepeatedLines()

    @property
    def num_dropped(self) -> int:
        return self._stdout.num_dropped + self.stderr.num_dropped

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._write_repeated(now := time.monotonic())
            if not _may_repeat(record) or not self._repeated_lines.is_repeat(record, _key(record), now):
                self._write(record)
        except Exception:  # noqa: BLE001 - as in all handlers of logging: no line may fail its caller
            self.handleError(record)

    def close(self) -> None:
        self._write_repeated(math.inf)
        self._stdout.close()
        self.stderr.close()
        super().close()

    def _write_repeated(self, now: float) -> None:
        for record, count in self._repeated_lines.due(now):
            vars(record).update(created=time.time(), correlation_id=None, repeated=count)
            self._write(record)

    def _write(self, record: logging.LogRecord) -> None:
        self._stdout.put(self._line(record))

    def _line(self, record: logging.LogRecord) -> bytes:
        return f"{self.format(record)}\n".encode(errors="backslashreplace")

    def _dropped_line(self, count: int) -> bytes:
        text = "%d log lines were dropped: they came faster than they were read"
        return self._line(logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, (count,), None))


def _may_repeat(record: logging.LogRecord) -> bool:
    """Not those of a single request: thousands may be cancelled together, and all differ."""
    return record.levelno >= logging.WARNING and not hasattr(record, "request_id")


def _key(record: logging.LogRecord) -> str:
    """The same for records that differ in nothing but their time."""
    error = record.exc_info[1] if record.exc_info else None
    return f"{record.levelno} {record.name} {record.getMessage()} {_fields(record, None)} {error!r}"


class _TextFormatter(logging.Formatter):
    def __init__(self, process: str | None) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        fields = [f"{name}={_quote(str(value))}" for name, value in _fields(record, self._process).items()]
        message = " ".join([_escape(record.getMessage()), *fields])
        line = f"{_timestamp(record)} {record.levelname:<7} {record.name}: {message}"
        if record.exc_info:  # indented, so that its text cannot be mistaken for a log line
            line += "".join(f"\n  {_escape(row)}" for row in self.formatException(record.exc_info).splitlines())
        return line


class _JsonFormatter(logging.Formatter):
    def __init__(self, process: str | None) -> None:
        super().__init__()
        self._process = process

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


def _escape(text: str) -> str:
    """The text on one line, whatever a client has put into it."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def _json_value(value: Any) -> Any:
    """JSON has no NaN."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
