"""How many CPUs this process may use: libraries count those of the machine, whatever a container is granted.

Its control groups say so, and how much memory it may use.
"""

import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePath

_ROOT = Path("/")


def usable_cpus(root: Path = _ROOT) -> int:
    """The CPUs of the affinity mask, or as many as use up the quota if those are fewer."""
    return _within_quota(len(os.sched_getaffinity(0)), root)


def usable_cores(root: Path = _ROOT) -> int:
    """The usable CPUs, counting the hyperthreads of a core once: a second one makes arithmetic no faster."""
    topologies = [root / f"sys/devices/system/cpu/cpu{cpu}/topology" for cpu in os.sched_getaffinity(0)]
    siblings = [_read(path / "thread_siblings_list") or str(path) for path in topologies]
    return _within_quota(len(set(siblings)), root)


def _within_quota(cpus: int, root: Path) -> int:
    quota = cpu_quota(root)
    return cpus if quota is None else min(cpus, math.ceil(quota))


def cpu_quota(root: Path = _ROOT) -> float | None:
    """The CPU time per second that the control groups of this process allow it; None for no limit."""
    return min((quota for group in control_groups("cpu", root) if (quota := _quota(group)) is not None), default=None)


def control_groups(controller: str, root: Path = _ROOT) -> Iterator[Path]:
    """The directories of this process's control groups, version 1 and 2, and of the groups that contain them.

    They are mounted where systemd and containers mount them. A container may see only its own group, at the top.
    """
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            group = root / "sys/fs/cgroup" / (controller if controllers else "")
            yield group
            for name in PurePath(path).parts[1:]:
                yield (group := group / name)


def _quota(group: Path) -> float | None:
    version_1 = f"{_read(group / 'cpu.cfs_quota_us')} {_read(group / 'cpu.cfs_period_us')}"
    match (_read(group / "cpu.max") or version_1).split():
        case [quota, period] if quota not in ("max", "-1"):
            return int(quota) / int(period)
    return None


def _read(path: Path) -> str:
    """The content of a file; nothing if it does not exist."""
    try:
        return path.read_text()
    except OSError:
        return ""
