"""When there was which fault, and who may notice it: what else honest clients notice is a problem."""

import enum
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

_AFTERMATH_SECONDS = 3.0  # until connections are made again and files read again


class Notice(enum.Enum):
    """Who may notice a fault: nobody else may."""

    HEALTH = enum.auto()  # whoever asks for the server's health
    CONNECTIONS = enum.auto()  # clients that open a connection
    ADAPTERS = enum.auto()  # calls that name an adapter
    CALLS = enum.auto()  # everybody: the process is gone


@dataclass(slots=True)
class FaultLog:
    """All faults so far."""

    counts: Counter[str] = field(default_factory=Counter)
    _ends: dict[Notice, float] = field(default_factory=dict)  # until when somebody may notice
    _active: Counter[Notice] = field(default_factory=Counter)

    @contextmanager
    def record(self, name: str, notices: frozenset[Notice]) -> Iterator[None]:
        """A fault, for the length of the block."""
        self.counts[name] += 1
        self._active.update(notices)
        try:
            yield
        finally:
            self._active.subtract(notices)
            self._ends.update(dict.fromkeys(notices, time.monotonic() + _AFTERMATH_SECONDS))

    def noticeable(self, notice: Notice, since: float) -> bool:
        """Whether there has been such a fault since that time of `time.monotonic`."""
        return self._active[notice] > 0 or self._ends.get(notice, 0.0) >= since
