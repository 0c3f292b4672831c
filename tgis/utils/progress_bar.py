"""How far a long piece of work over many bytes has come: a bar on a terminal, else a line now and then."""

import shutil
import sys
import threading
import time
from typing import TextIO

from huggingface_hub.utils import tqdm

LINE_SECONDS = 10.0  # between two lines where there is no terminal


def format_bytes(count: int) -> str:
    """A number of bytes for people: 12 bytes, 34.5 MB."""
    value, unit = float(count), "bytes"
    for larger in ("kB", "MB", "GB", "TB"):
        if value >= 999.5:
            value, unit = value / 1000, larger
    return f"{value:.3g} {unit}"


class ProgressBar:
    """Of `total` bytes, `done` of them before; threads may share it."""

    def __init__(self, label: str, total: int, done: int = 0, stream: TextIO | None = None) -> None:
        self._label, self._total, self._initial, self._done = label, total, done, done
        self._stream, self._lock = stream or sys.stderr, threading.Lock()
        self._start = self._printed_at = time.monotonic()
        columns, rows = shutil.get_terminal_size()  # some terminals do not know theirs, and tqdm then shows nothing
        self._bar = tqdm(
            desc=label,
            total=total,
            initial=done,
            unit="B",
            unit_scale=True,
            file=self._stream,
            ncols=columns,
            nrows=rows,
            leave=False,
            disable=not self._stream.isatty(),
        )

    def close(self) -> None:
        """The bar goes, and a line tells how long it took."""
        self._bar.close()
        seconds = time.monotonic() - self._start
        print(f"{self._line()} in {seconds:.1f} s", file=self._stream, flush=True)

    def advance(self, count: int) -> None:
        """So many bytes more; fewer than none if they were thrown away."""
        with self._lock:
            self._done += count
            self._bar.update(count)
            now = time.monotonic()
            if self._bar.disable and now - self._printed_at >= LINE_SECONDS:
                self._printed_at = now
                rate = format_bytes(round(max(self._done - self._initial, 0) / (now - self._start)))
                print(f"{self._line()}, {rate}/s", file=self._stream, flush=True)

    def _line(self) -> str:
        return f"{self._label}: {format_bytes(self._done)} of {format_bytes(self._total)}"
