"""`tgis serve` that measures its own event loop: `python -m measured_server FILE`."""

import asyncio
import mmap
import struct
import sys
import time
from pathlib import Path
from typing import Self

from tgis import server
from tgis.__main__ import main as tgis

INTERVAL_SECONDS = 0.001
_FORMAT = struct.Struct("dd")


class LoopMeter:
    """The longest callback in seconds of the CPU, and how late the loop was at worst, in memory of two processes."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _FORMAT.size)

    @classmethod
    def create(cls, path: Path) -> Self:
        path.write_bytes(bytes(_FORMAT.size))
        return cls(path)

    def reset(self) -> None:
        _FORMAT.pack_into(self._memory, 0, 0.0, 0.0)

    def read(self) -> tuple[float, float]:
        callback, lag = _FORMAT.unpack_from(self._memory)
        return callback, lag

    def record(self, *, callback: float = 0.0, lag: float = 0.0) -> None:
        longest, latest = self.read()
        if callback > longest or lag > latest:
            _FORMAT.pack_into(self._memory, 0, max(callback, longest), max(lag, latest))


def measure(meter: LoopMeter) -> None:
    """Measure every loop that this process runs: asyncio's own, whose callbacks can be measured, instead of uvloop."""
    run, create = asyncio.events.Handle._run, asyncio.new_event_loop

    def measured_run(handle: asyncio.Handle) -> None:
        start = time.thread_time()
        run(handle)
        meter.record(callback=time.thread_time() - start)

    def wake_up(loop: asyncio.AbstractEventLoop, due: float) -> None:
        meter.record(lag=loop.time() - due)
        _wait(loop)

    def _wait(loop: asyncio.AbstractEventLoop) -> None:
        due = loop.time() + INTERVAL_SECONDS
        loop.call_at(due, wake_up, loop, due)

    def measured_loop() -> asyncio.AbstractEventLoop:
        loop = create()
        _wait(loop)
        return loop

    asyncio.events.Handle._run = measured_run  # type: ignore[assignment, method-assign]
    asyncio.events.new_event_loop = measured_loop
    asyncio.runners.events.new_event_loop = measured_loop  # type: ignore[attr-defined]
    setattr(server, "uvloop", asyncio)  # noqa: B010 - mypy


if __name__ == "__main__":
    measure(LoopMeter(Path(sys.argv[1])))
    sys.argv = ["tgis", "serve"]
    tgis()
