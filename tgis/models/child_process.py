"""Runs a short-lived child process; a failure is reported in one line."""

import signal
import subprocess

from tgis.utils import stop_signals

MAX_REASON_LENGTH = 300
STDERR = 2


def run(command: list[str], seconds: float | None, *, show_output: bool = False) -> str | None:
    """Run `command` for at most `seconds`; None on success, else the last line of its stderr.

    `show_output` forwards its stdout to the stderr of this process; otherwise it is discarded.
    """
    stdout = STDERR if show_output else subprocess.DEVNULL
    try:
        with stop_signals.undoing():  # kills the child
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=subprocess.PIPE, check=False, timeout=seconds
            )
    except subprocess.TimeoutExpired:
        return f"not done after {seconds:.0f} s"
    if done.returncode == 0:
        return None
    if done.returncode < 0:
        return f"killed by {signal.Signals(-done.returncode).name}"
    lines = [line.strip() for line in done.stderr.decode("utf-8", "replace").splitlines()]
    return next((line for line in reversed(lines) if line), f"exit code {done.returncode}")[:MAX_REASON_LENGTH]
