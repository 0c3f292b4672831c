"""gRPC's own threads, which read from connections beside the event loop."""

import contextlib
import os
from pathlib import Path

NAMES = {"event_engine", "lifeguard"}  # the second one starts more of the first, which inherit its niceness
NICENESS = 10  # more than the event loop


def let_event_loop_go_first() -> None:
    """Where CPUs are short: what is read sooner waits for the event loop anyway. On Linux only."""
    with contextlib.suppress(OSError):
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                if (task / "comm").read_text().strip() in NAMES:
                    niceness = os.getpriority(os.PRIO_PROCESS, 0) + NICENESS
                    os.setpriority(os.PRIO_PROCESS, int(task.name), niceness)
