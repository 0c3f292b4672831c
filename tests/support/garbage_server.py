"""`tgis serve` that collects no garbage but on SIGUSR1, and says what was in it: `python -m garbage_server FILE`."""

import gc
import json
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from types import FrameType, TracebackType

from tgis.__main__ import main as tgis


def collected(server: int, report: Path) -> dict[str, int]:
    """What the process has left to the collector since it was last asked: frames, and objects of tgis."""
    os.kill(server, signal.SIGUSR1)
    until = time.monotonic() + 20
    while not report.exists():
        assert time.monotonic() < until
        time.sleep(0.01)
    found: dict[str, int] = json.loads(report.read_text())
    report.unlink()
    return found


def _report(path: Path) -> None:
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    found = Counter(filter(None, map(_described, gc.garbage)))
    gc.set_debug(0)
    gc.garbage.clear()
    gc.collect()
    new = path.with_suffix(".new")
    new.write_text(json.dumps(found))
    new.rename(path)


def _described(garbage: object) -> str | None:
    """None for what holds little: gRPC and aiohttp leave some objects after every call, or every error of theirs."""
    if isinstance(garbage, FrameType):
        return f"frame of {garbage.f_code.co_qualname}"
    kind = type(garbage)
    ours = kind.__module__.partition(".")[0] == "tgis"
    return kind.__qualname__ if ours or isinstance(garbage, TracebackType) else None


if __name__ == "__main__":
    gc.disable()
    gc.freeze = lambda: None  # gRPC takes calls with objects that it has made before
    file, sys.argv = Path(sys.argv[1]), ["tgis", "serve"]
    signal.signal(signal.SIGUSR1, lambda *_: _report(file))
    tgis()
