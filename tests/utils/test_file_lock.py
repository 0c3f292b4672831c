"""Locks between processes."""

import fcntl
import io
import threading
from pathlib import Path

import pytest
from harness import wait_until

from tgis.utils.file_lock import locked


def test_a_block_holds_the_lock_until_its_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path, entered = tmp_path / "new" / "folder" / "lock", threading.Event()

    def enter() -> None:
        with locked(path), path.open() as other:
            entered.set()
            with pytest.raises(BlockingIOError):
                fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)

    enter()
    entered.clear()
    path.write_text("kept")
    waiting = threading.Thread(target=enter)
    with path.open() as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        waiting.start()
        said = io.StringIO()  # it may come in parts
        wait_until(lambda: said.write(capfd.readouterr().err) >= 0 and said.getvalue().endswith("\n"), "message")
        assert said.getvalue() == f"waiting for another process to release {path}\n"
        assert not entered.is_set()
    waiting.join()
    assert (entered.is_set(), path.read_text()) == (True, "kept")


def test_where_there_are_no_locks_the_block_runs_without() -> None:
    with locked(Path("/proc/none/lock")):
        pass
