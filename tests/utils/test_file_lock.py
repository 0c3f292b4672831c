"""Locks between processes."""

import fcntl
from pathlib import Path

import pytest

from tgis.utils.file_lock import locked


def test_a_block_holds_the_lock_until_its_end(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "lock"
    with locked(path), path.open() as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with path.open() as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
