"""Runs a Containerfile without a container engine: its steps below a scratch directory, pip in a scratch venv.

What it makes runs in namespaces with this machine's root, read-only, as the base image; that needs root.
Knows the instructions that ours uses and fails on any other. Absolute paths of COPY and WORKDIR are below `root`.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
import venv
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

# $1: mount point; $2: root of the image; $3: this machine's Python; $4: user id; the rest: a command
CONFINE = """
set -e
ip link set lo up
mount --bind / "$1"
mount -o remount,bind,ro "$1"
mount --rbind /dev "$1/dev"
mount --rbind /proc "$1/proc"
mount -t tmpfs -o mode=1777 tmpfs "$1/tmp"
mount -t tmpfs -o mode=755 tmpfs "$1/root"  # which may hide Python from others
for seen in "$2" "$3"; do
    mkdir -p "$1$seen"
    mount --bind "$seen" "$1$seen"
    mount -o remount,bind,ro "$1$seen"
done
mount -o remount,ro "$1/root"
where=$1 user=$4
shift 4
exec chroot --userspec="$user:0" --groups= "$where" "$@"
"""


@dataclass
class Image:
    """The result of the steps so far."""

    root: Path
    environment: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    workdir: Path = Path("/")
    user: str = ""
    ports: list[int] = field(default_factory=list)
    command: list[str] = field(default_factory=list)

    @property
    def python_bin(self) -> Path:
        return self.root / "venv" / "bin"

    def local(self, path: str) -> Path:
        """The path on this machine of a path in the image."""
        return self.root / str(self.workdir / path).lstrip("/")

    def run(self, command: list[str], user: int | None = None) -> str:
        """Run a command as the image would, without this machine's environment; return its stdout."""
        environment = {"PATH": f"{self.python_bin}:/usr/bin:/bin", **self.environment}
        done = subprocess.run(
            command,
            cwd=self.local("."),
            env=environment,
            user=user,
            group=None if user is None else 0,
            extra_groups=None if user is None else [],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def run_confined(self, script: str, user: int) -> str:
        """Run a shell script as a user id of group 0: read-only but for an empty /tmp, no network but the loopback."""
        mount_point = self.root / "confined"
        mount_point.mkdir()
        environment = {"PATH": f"{self.python_bin}:/usr/bin:/bin", **self.environment}
        settings = [f"{name}={value}" for name, value in environment.items()]
        arguments = [str(mount_point), str(self.root), sys.base_prefix, str(user)]
        arguments += ["env", "-i", "-C", str(self.local(".")), *settings, "sh", "-ec", script]
        command = ["unshare", "-n", "-m", "sh", "-c", CONFINE, "sh", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout


def steps(text: str) -> list[tuple[str, str]]:
    """Instructions and their arguments."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(line.split()[0], line.split(maxsplit=1)[1].strip()) for line in joined.splitlines()]


def describe(text: str, root: Path) -> Image:
    """The image's settings; runs nothing."""
    image = Image(root)
    for instruction, argument in steps(text):
        match instruction:
            case "ENV":
                image.environment |= dict(pair.split("=", 1) for pair in argument.split())
            case "LABEL":
                image.labels |= dict(pair.split("=", 1) for pair in shlex.split(argument))
            case "WORKDIR":
                image.workdir = Path(argument)
            case "USER":
                image.user = argument
            case "EXPOSE":
                image.ports = [int(port) for port in argument.split()]
            case "CMD":
                image.command = json.loads(argument)
            case "FROM" | "ARG" | "COPY" | "RUN":
                pass
            case _:
                raise AssertionError(f"unknown instruction {instruction}")
    return image


def replay(text: str, context: Path, root: Path, build_args: Mapping[str, str]) -> Image:
    """Run COPY and RUN with the files of `context`; pip keeps this machine's settings."""
    image, arguments = Image(root), dict(build_args)
    venv.create(root / "venv", with_pip=True)
    for instruction, argument in steps(text):
        match instruction:
            case "WORKDIR":
                image.workdir = Path(argument)
                image.local(".").mkdir(parents=True, exist_ok=True)
            case "COPY" if argument.startswith("--from="):
                pass  # all stages share a root
            case "COPY":
                *sources, target = argument.split()
                for source in sources:
                    _copy(context / source, image.local(target))
            case "ARG" if "=" in argument:
                arguments.setdefault(*argument.split("=", 1))
            case "RUN":
                environment = os.environ | arguments | {"PATH": f"{image.python_bin}:{os.environ['PATH']}"}
                subprocess.run(["bash", "-ec", argument], cwd=image.local("."), env=environment, check=True)
    return describe(text, root)


def _copy(source: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(source, target, dirs_exist_ok=True, ignore=ignored)
    else:
        shutil.copy(source, target)


def unprivileged_uid() -> int | None:
    """A user id that owns nothing; None if we cannot switch to it or it cannot reach this Python."""
    reachable = all(parent.stat().st_mode & 0o001 for parent in Path(sys.base_prefix).resolve().parents)
    return 54321 if os.geteuid() == 0 and reachable else None
