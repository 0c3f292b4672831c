"""Checks that no other user of the machine can replace a directory, or what lies in it.

A volume (the root of a file system that root has mounted) may be open to everybody: containers get theirs that way, and
whoever else mounts it is trusted. So are the members of a group that may write.
"""

import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_ROOT = 0  # both the user and the group


@dataclass(frozen=True, slots=True)
class Entry:
    """A directory, link or file."""

    path: Path
    uid: int
    gid: int
    mode: int
    volume: bool = False


@dataclass(frozen=True, slots=True)
class Trust:
    """The users trusted with a directory."""

    uids: frozenset[int]
    code: frozenset[Path]  # the directories above this code: whoever can replace files there runs the server anyway
    any_user: bool  # a container made for any user id, whose files belong to whatever user and to group 0

    def refusal(self, entries: Sequence[Entry]) -> str | None:
        """Why others can replace what is in the last of `entries`, which lead there from the root."""
        for entry in entries:
            if entry.path in self.code:
                continue
            if entry.uid not in self.uids and not (self.any_user and entry.gid == _ROOT):
                return f"{entry.path} belongs to user {entry.uid}, who could replace what is in it"
            if entry.mode & stat.S_IWOTH and not _protected(entry, entries):
                return f"every user can write to {entry.path}"
        return None


def _protected(entry: Entry, entries: Sequence[Entry]) -> bool:
    """Return true if nobody can replace what is in the directory, even where others can write to it."""
    sticky = bool(entry.mode & stat.S_ISVTX) and entry is not entries[-1]  # whose next entry's owner is checked
    return sticky or stat.S_ISLNK(entry.mode) or entry.volume


def entries_of(path: Path) -> list[Entry]:
    """A directory or file that exists, after all directories and links that lead to it, from the root."""
    return [_entry(each) for each in _paths(path)]


def trust_of_this_process() -> Trust:
    """Trust this user, root, and the owner of this code; in a user namespace also the users outside of it."""
    uids = {os.getuid(), _ROOT, Path(__file__).stat().st_uid, *_outer_uids()}
    any_user = os.getuid() != _ROOT and _ROOT in (os.getgid(), *os.getgroups())
    return Trust(frozenset(uids), frozenset(Path(__file__).resolve().parents), any_user)


def _paths(path: Path) -> Iterator[Path]:
    """Every name that the kernel looks up, in order."""
    *rest, _ = reversed(path.absolute().parts)
    yield (here := Path("/"))
    while rest:
        path = here / rest.pop()
        yield path
        if path.is_symlink():
            target = path.readlink()
            rest += [part for part in reversed(target.parts) if part != "/"]
            here = Path("/") if target.is_absolute() else here
        else:
            here = path.resolve()  # `..`


def _entry(path: Path) -> Entry:
    status = path.lstat()
    volume = path != Path("/") and path.is_mount() and status.st_uid in {_ROOT, *_outer_uids()}
    return Entry(path, status.st_uid, status.st_gid, status.st_mode, volume)


def _outer_uids() -> set[int]:
    """The user id that stands for users of the host that a container's user namespace does not map."""
    try:
        whole = Path("/proc/self/uid_map").read_text().split() == ["0", "0", "4294967295"]
        return set() if whole else {int(Path("/proc/sys/kernel/overflowuid").read_text())}
    except OSError:
        return set()
