"""tgis.utils.private_directory: which directories others could tamper with, as deployments have them and attackers."""

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from tgis.utils.private_directory import Entry, Trust, entries_of, trust_of_this_process

US, STRANGER, FS_GROUP = 1000, 2000, 1000660000
CODE = frozenset({Path("/"), Path("/ci"), Path("/ci/tgis")})
USER = Trust(frozenset({0, US}), CODE, any_user=False)
ANY_USER = Trust(frozenset({0, US}), CODE, any_user=True)

SLASH = ("/", 0, 0, 0o755)
TMP = ("/tmp", 0, 0, 0o1777)
EMPTY_DIR = ("/tmp", 0, FS_GROUP, 0o2777, "volume")


def entries(*places: tuple[Any, ...]) -> list[Entry]:
    made = []
    for path, uid, gid, mode, *kind in places:
        link = stat.S_IFLNK if "link" in kind else stat.S_IFDIR
        made.append(Entry(Path(path), uid, gid, mode | link, "volume" in kind))
    return made


@pytest.mark.parametrize(
    ("trust", "places"),
    [
        (USER, [SLASH, TMP, ("/tmp/tgis-1000", US, US, 0o700)]),
        (USER, [SLASH, ("/home", 0, 0, 0o755), ("/home/us", US, US, 0o775), ("/home/us/cache", US, US, 0o775)]),
        # a checkout that others can change: they need no cache for that
        (USER, [SLASH, ("/ci", STRANGER, 0, 0o777), ("/ci/tgis", US, US, 0o755), ("/ci/tgis/c", US, US, 0o700)]),
        (USER, [SLASH, TMP, ("/tmp/link", US, US, 0o777, "link"), ("/data", US, US, 0o755)]),
        # the deployment: an emptyDir at /tmp, under OpenShift with a random user id
        (ANY_USER, [SLASH, EMPTY_DIR, ("/tmp/tgis", US, FS_GROUP, 0o2700)]),
        (ANY_USER, [SLASH, EMPTY_DIR, ("/tmp/tgis", US, FS_GROUP, 0o2770)]),  # after kubelet has applied fsGroup
        (ANY_USER, [SLASH, EMPTY_DIR]),
        (ANY_USER, [SLASH, ("/cache", 0, FS_GROUP, 0o2775, "volume"), ("/cache/tgis", US, FS_GROUP, 0o2700)]),
        (ANY_USER, [SLASH, ("/cache", 0, 0, 0o777, "volume")]),
        # an image made for any user id: its files belong to the user of its build and to group 0
        (ANY_USER, [SLASH, ("/opt/app-root", 1001, 0, 0o775), ("/opt/app-root/cache", 1001, 0, 0o775)]),
    ],
)
def test_deployments_are_accepted(trust: Trust, places: list[tuple[Any, ...]]) -> None:
    assert trust.refusal(entries(*places)) is None


@pytest.mark.parametrize(
    ("places", "reason"),
    [
        ([SLASH, TMP, ("/tmp/tgis-1000", STRANGER, STRANGER, 0o755)], "/tmp/tgis-1000 belongs to user 2000"),
        ([SLASH, TMP, ("/tmp/x", STRANGER, STRANGER, 0o777, "link"), ("/data", US, US, 0o700)], "/tmp/x belongs to"),
        ([SLASH, ("/home/s", STRANGER, 100, 0o755), ("/home/s/cache", US, US, 0o700)], "/home/s belongs to user 2000"),
        ([SLASH, ("/opt/app-root", STRANGER, 0, 0o775), ("/opt/app-root/c", US, US, 0o700)], "/opt/app-root belongs"),
        ([SLASH, ("/scratch", 0, 0, 0o777), ("/scratch/us", US, US, 0o700)], "every user can write to /scratch"),
        ([SLASH, TMP], "every user can write to /tmp"),  # somebody may have made what we will look for there
        ([SLASH, TMP, ("/tmp/us", US, US, 0o777)], "every user can write to /tmp/us"),
    ],
)
def test_what_others_can_replace_is_refused(places: list[tuple[Any, ...]], reason: str) -> None:
    refusal = USER.refusal(entries(*places))
    assert refusal is not None
    assert refusal.startswith(reason)


def test_every_directory_and_link_on_the_way_is_looked_at(tmp_path: Path) -> None:
    base = tmp_path.resolve()
    (base / "real" / "deep").mkdir(parents=True)
    (base / "other").mkdir()
    (base / "other" / "back").symlink_to(base / "real")
    (base / "link").symlink_to("other/back")
    to_base = [*reversed(base.parents), base]
    assert [entry.path for entry in entries_of(base / "link" / "deep")] == [
        *to_base,
        *(base / name for name in ("link", "other", "other/back")),
        *to_base[1:],  # the target of `back` is absolute
        *(base / name for name in ("real", "real/deep")),
    ]


def test_modes_are_those_of_the_file_system(tmp_path: Path) -> None:
    directory = tmp_path / "cache"
    directory.mkdir(mode=0o700)
    assert trust_of_this_process().refusal(entries_of(directory)) is None
    for mode in (0o777, 0o1777):
        directory.chmod(mode)
        assert trust_of_this_process().refusal(entries_of(directory)) == f"every user can write to {directory}"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_a_directory_of_another_user(tmp_path: Path) -> None:
    (tmp_path / "home" / "cache").mkdir(parents=True)
    os.chown(tmp_path / "home", STRANGER, STRANGER)
    refusal = trust_of_this_process().refusal(entries_of(tmp_path / "home" / "cache"))
    assert refusal == f"{tmp_path / 'home'} belongs to user {STRANGER}, who could replace what is in it"
