"""tgis.utils.private_directory: which directories others could tamper with, as deployments have them and attackers."""

import os
from pathlib import Path

import pytest

from tgis.utils import private_directory
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
    """This process as user 1000, in its own group."""
    monkeypatch.setattr(os, "getuid", lambda: US)
    monkeypatch.setattr(os, "getgid", lambda: US)
    monkeypatch.setattr(os, "getgroups", lambda: [US])


def test_what_everybody_can_write_to_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / "cache"
    directory.mkdir(mode=0o700)
    assert refusal_of(directory) is None
    for mode in (0o777, 0o1777):
        directory.chmod(mode)
        assert refusal_of(directory) == f"every user can write to {directory}"


def test_what_is_above_may_be_open_if_it_is_sticky(tmp_path: Path) -> None:
    directory = tmp_path / "shared" / "cache"
    directory.mkdir(parents=True)
    directory.parent.chmod(0o1777)
    assert refusal_of(directory) is None
    directory.parent.chmod(0o777)
    assert refusal_of(directory) == f"every user can write to {directory.parent}"


@only_root
@pytest.mark.usefixtures("as_user")
@pytest.mark.parametrize("mode", [0o700, 0o775])
def test_directories_of_this_user_are_accepted(tmp_path: Path, mode: int) -> None:
    assert refusal_of(make(make(tmp_path / "us", mode, US, US) / "cache", mode, US, US)) is None


@only_root
@pytest.mark.usefixtures("as_user")
@pytest.mark.parametrize("whose", ["directory", "parent", "link"])
def test_what_belongs_to_others_is_refused(tmp_path: Path, whose: str) -> None:
    parent = make(tmp_path / "home", uid=STRANGER if whose == "parent" else US)
    directory, link = make(parent / "cache", uid=STRANGER if whose == "directory" else US), tmp_path / "link"
    link.symlink_to(directory)
    os.chown(link, STRANGER if whose == "link" else US, US, follow_symlinks=False)
    refused = {"directory": directory, "parent": parent, "link": link}[whose]
    assert refusal_of(link) == f"{refused} belongs to user {STRANGER}, who could replace what is in it"


def test_what_links_lead_to_is_looked_at(tmp_path: Path) -> None:
    (tmp_path / "open" / "deep").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "back").symlink_to("../open")
    (tmp_path / "link").symlink_to(tmp_path / "other" / "back")
    assert refusal_of(tmp_path / "link" / "deep") is None
    (tmp_path / "open").chmod(0o1777)
    assert refusal_of(tmp_path / "link" / "deep") is None
    assert str(refusal_of(tmp_path / "link")).startswith("every user can write to")
    (tmp_path / "open").chmod(0o777)
    assert str(refusal_of(tmp_path / "link" / "deep")).startswith("every user can write to")
    (tmp_path / "open").chmod(0o755)
    (tmp_path / "other").chmod(0o777)
    assert refusal_of(tmp_path / "link" / "deep") == f"every user can write to {tmp_path / 'other'}"


@only_root
@pytest.mark.usefixtures("as_user")
def test_an_image_for_any_user_has_files_of_group_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = make(make(tmp_path / "app-root", 0o775, 1001) / "cache", 0o775, 1001)
    assert refusal_of(directory) == f"{directory.parent} belongs to user 1001, who could replace what is in it"
    monkeypatch.setattr(os, "getgroups", lambda: [US, 0])
    assert refusal_of(directory) is None


@only_root
@pytest.mark.usefixtures("as_user")
def test_a_volume_may_be_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    volume = make(tmp_path / "tmp", 0o2777)
    directory = make(volume / "tgis", 0o2770, US)
    monkeypatch.setattr(Path, "is_mount", lambda path: path == volume)
    assert refusal_of(volume) is None
    assert refusal_of(directory) is None
    os.chown(volume, US, US)  # whoever mounts something of their own
    assert refusal_of(directory) == f"every user can write to {volume}"


@only_root
@pytest.mark.usefixtures("as_user")
def test_a_checkout_that_others_can_change_needs_no_care(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout = make(tmp_path / "ci", 0o777, STRANGER)
    monkeypatch.setattr(private_directory, "__file__", str(checkout / "code.py"))
    (checkout / "code.py").touch()
    assert refusal_of(make(checkout / "cache", 0o700, US)) is None
