"""The CPUs that this process may use: libraries count those of the machine, whatever a container is granted.

Its control groups say how many, and how much memory it may use.
"""

import math
import os
from collections import defaultdict
from collections.abc import Collection, Iterator
from pathlib import Path, PurePath

_ROOT = Path("/")


def usable_cpus(root: Path = _ROOT) -> int:
    """The CPUs of the affinity mask, or as many as use up the quota if those are fewer."""
    return _within_quota(len(os.sched_getaffinity(0)), root)


def usable_cores(root: Path = _ROOT) -> int:
    """The usable CPUs, counting the hyperthreads of a core once: a second one makes arithmetic no faster."""
    return _within_quota(len({_siblings(cpu, root) for cpu in os.sched_getaffinity(0)}), root)


def share_of_nodes(rank: int, num_ranks: int, cpus: Collection[int], root: Path = _ROOT) -> dict[int, list[int]]:
    """The CPUs of one of the ranks that share these, by NUMA node; empty where there is one node, or too few cores.

    Ranks take the cores in the order of their nodes, as many each: a rank has one node if there are as many nodes.
    """
    nodes = {cpu: int(path.parent.name[4:]) for path in _node_lists(root) for cpu in _listed(_read(path))}
    cores = defaultdict[tuple[int, str], list[int]](list)
    for cpu in sorted(cpus):
        cores[nodes.get(cpu, 0), _siblings(cpu, root)].append(cpu)
    if len({node for node, _ in cores}) < 2 or len(cores) < num_ranks:
        return {}
    ordered = sorted(cores, key=lambda core: core[0])
    share = defaultdict[int, list[int]](list)
    for core in ordered[rank * len(cores) // num_ranks : (rank + 1) * len(cores) // num_ranks]:
        share[core[0]] += cores[core]
    return share


def _node_lists(root: Path) -> Iterator[Path]:
    return (root / "sys/devices/system/node").glob("node[0-9]*/cpulist")


def _listed(text: str) -> Iterator[int]:
    """The numbers in a list of ranges, as 0-2,7."""
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            yield from range(int(first), int(last or first) + 1)


def _siblings(cpu: int, root: Path) -> str:
    """The hyperthreads of the core that this one belongs to."""
    return _read(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") or str(cpu)


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
