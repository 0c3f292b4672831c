"""Checks that no other user of the machine controls a directory or file that code is loaded from."""

import os
import stat
from pathlib import Path

_ROOT = 0


def refusal_of(path: Path) -> str | None:
    """Explain why another user controls `path`; None if only this user, root or the owner of this code does.

    A mount point is trusted: containers get volumes that way, often open to all users. So is group 0, to which files
    of containers belong that run with a random user id.
    """
    if path.is_mount():
        return None
    trusted = {os.getuid(), _ROOT, Path(__file__).stat().st_uid}
    for status in (path.lstat(), path.stat()):  # a link and its target
        if status.st_uid not in trusted and status.st_gid != _ROOT:
            return f"{path} belongs to user {status.st_uid}, who could replace what is in it"
    return f"every user can write to {path}" if path.stat().st_mode & stat.S_IWOTH else None
