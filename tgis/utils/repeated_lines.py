"""Tells log lines that repeat others, which a fault may bring by the thousand, and counts them."""

import copy
import logging
from dataclasses import dataclass

REPEAT_SECONDS = 10.0
MAX_LINES = 1000


@dataclass(slots=True)
class _Line:
    record: logging.LogRecord
    since: float
    count: int = 0  # repeats since then


class RepeatedLines:
    """What has been logged in the last ten seconds; `now` is any clock."""

    def __init__(self) -> None:
        self._lines: dict[str, _Line] = {}  # the oldest first

    def is_repeat(self, record: logging.LogRecord, key: str, now: float) -> bool:
        """Whether a record with the same `key` was there in the last ten seconds."""
        if line := self._lines.get(key):
            line.count += 1
            return True
        if len(self._lines) < MAX_LINES:
            self._lines[key] = _Line(_without_traceback(record), now)
        return False

    def due(self, now: float) -> list[tuple[logging.LogRecord, int]]:
        """Records that were repeated and whose ten seconds are over, each with the number of times."""
        found = []
        while self._lines and now - (line := next(iter(self._lines.values()))).since >= REPEAT_SECONDS:
            del self._lines[key := next(iter(self._lines))]
            if line.count:
                found.append((line.record, line.count))
                self._lines[key] = _Line(copy.copy(line.record), now)
        return found


def _without_traceback(record: logging.LogRecord) -> logging.LogRecord:
    """Neither arguments nor what the frames of a traceback hold may stay in memory."""
    kept = copy.copy(record)
    kept.msg, kept.args, kept.exc_info = record.getMessage(), None, None
    return kept
