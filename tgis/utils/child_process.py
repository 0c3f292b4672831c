"""A short-lived child process, and why it failed in one line."""

import signal
import subprocess

MAX_REASON_LENGTH = 300
STDERR = 2


def run(command: list[str], seconds: float | None, *, show_output: bool = False) -> str | None:
    """Run `command` without input for at most `seconds`; None if it succeeds, else the end of its stderr.

    `show` sends its stdout to the stderr of this process, else it is lost.
    """
    stdout = STDERR if show_output else subprocess.DEVNULL
    try:
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
