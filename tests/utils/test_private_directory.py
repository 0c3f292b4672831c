"""tgis.utils.private_directory: directories of deployments and of attackers."""

import os
from pathlib import Path

import pytest

from tgis.utils.private_directory import refusal_of

US, STRANGER = 1000, 2000
only_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")


def make(path: Path, mode: int = 0o755, uid: int = 0, gid: int = 0) -> Path:
    path.mkdir(exist_ok=True)
    path.chmod(mode)
    os.chown(path, uid, gid)
    return path


@pytest.fixture
def as_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process as user 1000."""
    monkeypatch.setattr(os, "getuid", lambda: US)


def test_what_everybody_can_write_to_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / "cache"
    directory.mkdir(mode=0o700)
    assert refusal_of(directory) is None
    directory.chmod(0o1777)
    assert refusal_of(directory) == f"every user can write to {directory}"


@only_root
@pytest.mark.usefixtures("as_user")
@pytest.mark.parametrize("whose", ["directory", "link"])
def test_what_belongs_to_others_is_refused(tmp_path: Path, whose: str) -> None:
    directory, link = make(tmp_path / "cache", uid=STRANGER if whose == "directory" else US, gid=US), tmp_path / "link"
    link.symlink_to(directory)
    os.chown(link, STRANGER if whose == "link" else US, US, follow_symlinks=False)
    assert refusal_of(link) == f"{link} belongs to user {STRANGER}, who could replace what is in it"


@only_root
@pytest.mark.usefixtures("as_user")
def test_directories_of_this_user_and_of_group_0_are_accepted(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(make(tmp_path / "cache", 0o775, US, US))
    assert refusal_of(tmp_path / "link") is None
    assert refusal_of(make(tmp_path / "cache", 0o775, uid=1001, gid=0)) is None
    assert refusal_of(make(tmp_path / "cache", 0o775, uid=1001, gid=1001)) is not None


def test_a_volume_may_be_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    volume.chmod(0o777)
    monkeypatch.setattr(Path, "is_mount", lambda path: path == volume)
    assert refusal_of(volume) is None
