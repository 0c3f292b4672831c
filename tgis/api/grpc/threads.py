"""gRPC's own threads, which read from connections beside the event loop."""

import contextlib
import os
import threading
from pathlib import Path

NICENESS = 10  # more than the event loop


def let_event_loop_go_first() -> None:
    """Where CPUs are short: what is read sooner waits for the event loop anyway. On Linux only.

    These are the threads that Python did not start; those that they start later inherit their niceness.
    """
    started_by_python = {thread.native_id for thread in threading.enumerate()}
    niceness = os.getpriority(os.PRIO_PROCESS, 0) + NICENESS
    with contextlib.suppress(OSError):
        for _ in range(2):  # then those that others have started meanwhile
            for thread in {int(task.name) for task in Path("/proc/self/task").iterdir()} - started_by_python:
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    os.setpriority(os.PRIO_PROCESS, thread, niceness)
