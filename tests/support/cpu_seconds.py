"""Run a command, and print the CPU seconds of all processes that it started; the exit code is the command's.

This process adopts orphans (PR_SET_CHILD_SUBREAPER), so the kernel's sum over its children misses none of them.
"""

import ctypes
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
CHILDREN = Path(f"/proc/self/task/{os.getpid()}/children")


def end_orphans() -> None:
    deadline = time.monotonic() + 5.0  # for those that notice the end of their parent
    while children := CHILDREN.read_text().split() if CHILDREN.exists() else []:
        if os.waitpid(-1, os.WNOHANG)[0] == 0 and time.monotonic() > deadline:
            command = Path(f"/proc/{children[0]}/cmdline").read_text(errors="replace").replace("\0", " ")
            print(f"killing process {children[0]}, which the command has left: {command}")
            os.kill(int(children[0]), signal.SIGKILL)
        time.sleep(0.05)


start = time.monotonic()
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
process = subprocess.Popen(sys.argv[1:])
signal.signal(signal.SIGINT, lambda *_: None)  # a terminal sends it to the command too
signal.signal(signal.SIGTERM, lambda *_: process.terminate())
while (ended := os.wait())[0] != process.pid:
    pass  # an orphan, reaped at once as init would
end_orphans()
usage = resource.getrusage(resource.RUSAGE_CHILDREN)
print(f"{usage.ru_utime + usage.ru_stime:.0f} CPU seconds in {time.monotonic() - start:.0f} seconds")
sys.exit(os.waitstatus_to_exitcode(ended[1]) % 256)
