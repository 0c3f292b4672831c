"""tgis.utils.file_lock: when the directory goes, and which others."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tgis.utils.file_lock import scratch_directory

HOLD = """
import sys
from pathlib import Path
from tgis.utils.file_lock import scratch_directory
with scratch_directory(Path(sys.argv[1])) as path:
    (path / "left").touch()
    print(path, flush=True)
    sys.stdin.read()
"""


def directories(parent: Path) -> list[Path]:
    return [path for path in parent.iterdir() if path.is_dir()]


def test_a_directory_lasts_as_long_as_its_process(tmp_path: Path) -> None:
    parent = tmp_path / "tmp"
    command = [sys.executable, "-c", HOLD, str(parent)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        theirs = Path(process.stdout.readline().strip())
        with scratch_directory(parent) as ours:
            assert ours is not None
            assert set(directories(parent)) == {ours, theirs}
        assert directories(parent) == [theirs]
        process.send_signal(signal.SIGKILL)
    assert (theirs / "left").exists()
    with scratch_directory(parent) as ours:
        assert directories(parent) == [ours]
    assert directories(parent) == []


@pytest.mark.parametrize("parent", ["file", "file/tmp"])
def test_without_a_place_there_is_none(tmp_path: Path, parent: str, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    with scratch_directory(tmp_path / parent) as path:
        assert path is None
    assert f"temporary files are not in {tmp_path / parent}" in caplog.text
    assert os.listdir(tmp_path) == ["file"]
