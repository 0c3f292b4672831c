"""Checks that no other user of the machine can replace a directory, or what lies in it.

Trusted are this user, root, the owner of this code, and the members of a group that may write. A volume (the root of a
file system that root has mounted) may be open to everybody: containers get theirs that way, and whoever else mounts it
is trusted.
"""

import os
import stat
from pathlib import Path

_ROOT = 0  # both the user and the group


def refusal_of(path: Path, *, is_last: bool = True) -> str | None:
    """Why others can replace a directory or file, or what is in it: because of itself, or of what leads there.

    What is looked up in the path itself, unless it `is_last`, is checked by the caller.
    """
    path, code = path.absolute(), Path(__file__).resolve()  # whoever can write above the code runs the server anyway
    uids, any_user = {os.getuid(), code.stat().st_uid, *_system_uids()}, _is_any_user()
    for each in (*reversed(path.parents), path):
        status, is_end = each.lstat(), is_last and each == path
        if each in code.parents:
            continue
        if status.st_uid not in uids and not (any_user and status.st_gid == _ROOT):
            return f"{each} belongs to user {status.st_uid}, who could replace what is in it"
        sticky = status.st_mode & stat.S_ISVTX and not is_end  # the owner of what is in it is checked
        if each.is_symlink():
            if refusal := refusal_of(each.parent / each.readlink(), is_last=is_end):
                return refusal
        elif status.st_mode & stat.S_IWOTH and not (sticky or _is_volume(each, status)):
            return f"every user can write to {each}"
    return None


def _is_volume(path: Path, status: os.stat_result) -> bool:
    return path != Path("/") and path.is_mount() and status.st_uid in _system_uids()


def _is_any_user() -> bool:
    """Whether this is a container made for any user id, whose files belong to whatever user and to group 0."""
    return os.getuid() != _ROOT and _ROOT in (os.getgid(), *os.getgroups())


def _system_uids() -> set[int]:
    """Root, and the user id that stands for users of the host that a container's user namespace does not map."""
    try:
        whole = Path("/proc/self/uid_map").read_text().split() == ["0", "0", "4294967295"]
        return {_ROOT} if whole else {_ROOT, int(Path("/proc/sys/kernel/overflowuid").read_text())}
    except OSError:
        return {_ROOT}
