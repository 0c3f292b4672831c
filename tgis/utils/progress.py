"""What takes longer than two seconds shows how far it is: as a bar if stderr is a terminal, else in the log."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tqdm import tqdm

LOG_SECONDS = 10.0
_BAR_SECONDS = 0.2
# The cursor returns to the beginning, so that a line of the log replaces the bar. None: no bar without a terminal.
_BAR: dict[str, Any] = {"delay": 2, "leave": False, "ncols": 70, "bar_format": "{l_bar}{bar}{r_bar}\r", "disable": None}
_LOG_LINE = "  {desc}: {n_fmt} of {total_fmt}{unit} after {elapsed}"

log = logging.getLogger(__name__)


def bar(items: Iterable[Any], label: str, total: int) -> Any:
    """The items, counted by a bar."""
    return tqdm(items, label, total, **_BAR)


@contextlib.contextmanager
def watched(label: str, measure: Callable[[], float], total: float | None, unit: str = "") -> Iterator[None]:
    """While the block runs, another thread shows what `measure` returns of the total; None: it is unknown.

    With the unit B, numbers are multiples of 1024.
    """
    kind: dict[str, Any] = {"unit": unit, "unit_scale": unit == "B", "unit_divisor": 1024}
    done, started = threading.Event(), time.monotonic()

    def run() -> None:
        while not done.wait(LOG_SECONDS if shown.disable else _BAR_SECONDS):
            count = min(measure(), total or float("inf"))
            if shown.disable:
                elapsed = time.monotonic() - started
                log.info(tqdm.format_meter(count, total, elapsed, prefix=label, bar_format=_LOG_LINE, **kind))
            else:
                shown.update(count - shown.n)

    with tqdm(desc=label, total=total, **kind, **_BAR) as shown:
        thread = threading.Thread(target=run, daemon=True, name="progress")
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
