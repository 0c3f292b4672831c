"""Progress of slow work on stderr: for bytes a bar on a terminal, else a line every few seconds."""

import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from typing import TextIO

from huggingface_hub.utils import tqdm

LINE_SECONDS = 10.0  # between lines if there is no terminal


def format_bytes(count: int) -> str:
    """Human-readable: 12 bytes, 34.5 MB."""
    value, unit = float(count), "bytes"
    for larger in ("kB", "MB", "GB", "TB"):
        if value >= 999.5:
            value, unit = value / 1000, larger
    return f"{value:.3g} {unit}"


@contextlib.contextmanager
def timed(label: str) -> Iterator[None]:
    """Print when the block starts and how long it took."""
    print(f"{label} ...", file=sys.stderr, flush=True)
    start = time.monotonic()
    yield
    print(f"{label}: {time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)


class ProgressBar:
    """Of `total` bytes, `done` before the start. Thread-safe."""

    def __init__(self, label: str, total: int, done: int = 0, stream: TextIO | None = None) -> None:
        self._label, self._total, self._initial, self._done = label, total, done, done
        self._stream, self._lock = stream or sys.stderr, threading.Lock()
        self._start = self._printed_at = time.monotonic()
        columns, rows = shutil.get_terminal_size()  # tqdm shows nothing if the terminal reports no size
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
        """Remove the bar and print a summary line."""
        self._bar.close()
        seconds = time.monotonic() - self._start
        print(f"{self._line()} in {seconds:.1f} s", file=self._stream, flush=True)

    def advance(self, count: int) -> None:
        """Add `count` bytes; negative if some were discarded."""
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
