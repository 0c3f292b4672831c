"""tgis.utils.stop_signals, in processes of their own."""

import signal
import subprocess
import sys
from pathlib import Path

START = "import os, signal, sys, time; from tgis.utils import stop_signals; stop_signals.handle_by_exit()\n"

UNDONE = """
try:
    with stop_signals.undoing():
        print("ready", flush=True)
        time.sleep(60)
finally:
    os.kill(os.getpid(), signal.SIGTERM)
    print("undone")
"""

AFTERWARDS = """
with stop_signals.undoing():
    pass
try:
    os.kill(os.getpid(), signal.SIGTERM)
finally:
    print("goes on")
"""


def test_a_server_that_starts_exits_whatever_it_is_doing() -> None:
    """Modules written in C swallow exceptions while they are imported, or crash."""
    done = subprocess.run([sys.executable, "-c", START + AFTERWARDS], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_server_of_nohup_goes_on_when_its_terminal_ends() -> None:
    program = f"import os, signal; signal.signal(1, signal.SIG_IGN)\n{START}os.kill(os.getpid(), 1); print('goes on')"
    assert subprocess.check_output([sys.executable, "-c", program]) == b"goes on\n"


def test_what_has_begun_is_undone_whatever_else_comes() -> None:
    command = [sys.executable, "-c", START + UNDONE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.read() == "undone\n"
    assert process.returncode == 0


def test_other_commands_keep_their_handlers() -> None:
    program = "import signal; from tgis.utils import stop_signals\nwith stop_signals.undoing(): signal.raise_signal(15)"
    done = subprocess.run([sys.executable, "-c", program], check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == -signal.SIGTERM
