"""A short-lived child process, and why it failed in one line."""

import subprocess

MAX_REASON = 300


def run(command: list[str], seconds: float) -> str | None:
    """Run `command` without input for at most `seconds`; None if it succeeds, else the end of its stderr."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"not done after {seconds:.0f} s"
    if done.returncode == 0:
        return None
    lines = [line.strip() for line in done.stderr.decode("utf-8", "replace").splitlines()]
    return next((line for line in reversed(lines) if line), f"exit code {done.returncode}")[:MAX_REASON]
