"""Which faults there were, when, and who may notice them; anything else that honest clients notice is a problem."""

import enum
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

_AFTERMATH_SECONDS = 3.0  # until clients have reconnected and files are read again


class Notice(enum.Enum):
    """The only clients that may notice a fault."""

    HEALTH = enum.auto()  # whoever asks for the server's health
    CONNECTIONS = enum.auto()  # clients that open a connection
    ADAPTERS = enum.auto()  # calls that name an adapter
    CALLS = enum.auto()  # everybody: the process is gone


@dataclass(slots=True)
class FaultLog:
    """All faults so far."""

    counts: Counter[str] = field(default_factory=Counter)
    _ends: dict[Notice, float] = field(default_factory=dict)  # until when effects may be noticed
    _active: Counter[Notice] = field(default_factory=Counter)

    @contextmanager
    def record(self, name: str, notices: frozenset[Notice]) -> Iterator[None]:
        """Record a fault that lasts as long as the block."""
        self.counts[name] += 1
        self._active.update(notices)
        try:
            yield
        finally:
            self._active.subtract(notices)
            self._ends.update(dict.fromkeys(notices, time.monotonic() + _AFTERMATH_SECONDS))

    def noticeable(self, notice: Notice, since: float) -> bool:
        """True if effects of a fault were possible at `since` (`time.monotonic`) or later."""
        return self._active[notice] > 0 or self._ends.get(notice, 0.0) >= since
