"""How log lines look, in both processes: text or JSON on stdout, one line each, with the correlation id.

Nothing here, and nothing that calls it, may log what clients send or get unless LOG_TEXT asks for it.
"""

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
MAX_ID_LENGTH = 128  # of a correlation id, which clients choose

_correlation_id: ContextVar[str | None] = ContextVar("correlation_id", default=None)
_RECORD_ATTRIBUTES = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}

log = logging.getLogger(__name__)


def configure(*, level: str, json_output: bool, process: str | None = None) -> None:
    """Send every log line of this process to stdout; `process` marks the lines of any but the front end.

    The level is for tgis; libraries are heard from warnings on. What is no level (TGIS takes filters in the
    syntax of Rust) is info, with a warning. To be called once; a second call replaces the first.
    """
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(_JsonFormatter(process) if json_output else _TextFormatter(process))
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.captureWarnings(True)
    for name in ("tgis", "__main__"):  # a module that is run is named so
        logging.getLogger(name).setLevel(LEVELS.get(level.lower(), logging.INFO))
    if level.lower() not in LEVELS:
        log.warning("LOG_LEVEL=%r is none of %s: using info", level, ", ".join(LEVELS))


@contextlib.contextmanager
def correlation_scope(correlation_id: str | None) -> Iterator[None]:
    """Every line that is logged inside, in tasks started there too, carries the id."""
    token = _correlation_id.set(correlation_id[:MAX_ID_LENGTH] if correlation_id else None)
    try:
        yield
    finally:
        _correlation_id.reset(token)


def write_termination_message(path: Path, reason: str) -> None:
    """Write why the process ends to the termination log, where Kubernetes made one."""
    with contextlib.suppress(OSError), path.open("r+") as file:  # never create it
        file.truncate()
        file.write(reason + "\n")


class _TextFormatter(logging.Formatter):
    def __init__(self, process: str | None) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        facts = [f"{name}={_quote(str(value))}" for name, value in _fields(record, self._process).items()]
        message = " ".join([_escape(record.getMessage()), *facts])
        line = f"{_timestamp(record)} {record.levelname:<7} {record.name}: {message}"
        if record.exc_info:  # indented, so that no text in it passes for a line of the log
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
        facts = {name: _json_value(value) for name, value in _fields(record, self._process).items()}
        return json.dumps(line | facts | line, default=str)


def _timestamp(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _fields(record: logging.LogRecord, process: str | None) -> dict[str, Any]:
    """What the line says beside its message: `extra` of the call, and where it belongs."""
    extra = {name: value for name, value in vars(record).items() if name not in _RECORD_ATTRIBUTES}
    facts = {"process": process, "correlation_id": _correlation_id.get(), **extra}
    return {name: value for name, value in facts.items() if value is not None}


def _quote(text: str) -> str:
    return text if text.isprintable() and text and not set(text) & set(" =\"'") else repr(text)


def _escape(text: str) -> str:
    """On one line, whatever a client put into it."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def _json_value(value: Any) -> Any:
    """JSON has no NaN."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
