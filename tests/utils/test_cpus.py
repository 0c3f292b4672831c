"""CPU quotas of control groups, read from file trees as Docker and Kubernetes show them, and NUMA nodes."""

import math
import os
from pathlib import Path
from unittest import mock

import pytest

from tgis import defaults
from tgis.config import parse
from tgis.utils.cpus import cpu_quota, share_of_nodes, usable_cores, usable_cpus


def tree(root: Path, membership: str, files: dict[str, str]) -> Path:
    """A file system with these groups; `files` are below /sys/fs/cgroup."""
    for name, content in (
        {"proc/self/cgroup": membership} | {f"sys/fs/cgroup/{name}": content for name, content in files.items()}
    ).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")
    return root


def v1(quota: str, group: str = "") -> dict[str, str]:
    return {f"cpu/{group}cpu.cfs_quota_us": quota, f"cpu/{group}cpu.cfs_period_us": "100000"}


POD = "kubepods.slice/pod12.slice"
NESTED = {"kubepods.slice/cpu.max": "6400000 100000", f"{POD}/cpu.max": "75000 50000"}
ABOVE = {"kubepods.slice/cpu.max": "300000 100000", f"{POD}/cpu.max": "max 100000"}
CASES = {  # membership, files -> quota
    "v2, a container's own namespace": ("0::/", {"cpu.max": "250000 100000"}, 2.5),
    "v2, the lowest of nested groups": (f"0::/{POD}", NESTED, 1.5),
    "v2, the limit is above the process's own group": (f"0::/{POD}", ABOVE, 3),
    "v2, the host's path, but only the container's group is mounted": ("0::/docker/ab12", {"cpu.max": "16 1"}, 16),
    "v2, outside the namespace": ("0::/../ef34", {"cpu.max": "50000 100000"}, 0.5),
    "v1, no limit": ("4:cpu,cpuacct:/", v1("-1"), None),
    "v1, the host's path, but only the container's group is mounted": ("4:cpu,cpuacct:/docker/a", v1("150000"), 1.5),
    "v1, nested": (f"4:cpuacct,cpu:/{POD}", v1("400000") | v1("120000", f"{POD}/"), 1.2),
    "v1 for CPUs, v2 for nothing": ("4:cpu,cpuacct:/\n0::/", v1("200000") | {"unified/cgroup.procs": "1"}, 2),
    "no limit anywhere": ("0::/a/b", {}, None),
}


@pytest.mark.parametrize(("membership", "files", "quota"), CASES.values(), ids=CASES.keys())
def test_the_quota(tmp_path: Path, membership: str, files: dict[str, str], quota: float | None) -> None:
    root = tree(tmp_path, membership, files)
    assert cpu_quota(root) == quota
    affinity = len(os.sched_getaffinity(0))
    assert usable_cpus(root) == (affinity if quota is None else min(affinity, math.ceil(quota)))


@pytest.mark.parametrize(("mask", "quota", "cores"), [(range(128), 16, 16), (range(8), 16, 4), (range(64, 67), 16, 2)])
def test_a_core_is_counted_once_and_within_the_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mask: range, quota: int, cores: int
) -> None:
    root = tree(tmp_path, "0::/", {"cpu.max": f"{quota}00000 100000"})
    for cpu in range(128):  # two hyperthreads each
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{cpu // 2 * 2}-{cpu // 2 * 2 + 1}\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(mask))
    assert usable_cores(root) == cores
    assert usable_cpus(root) == min(len(mask), quota)


@pytest.mark.parametrize(
    ("environ", "threads"),
    [
        ({}, usable_cores()),
        ({"OMP_NUM_THREADS": "5,2"}, 5),  # of nested parallel regions
        ({"OMP_NUM_THREADS": "many"}, usable_cores()),
        ({"OMP_NUM_THREADS": "0"}, usable_cores()),
        ({"OMP_NUM_THREADS": "3", "NUM_THREADS": "7"}, 7),
    ],
)
def test_the_threads_of_the_engine(environ: dict[str, str], threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for name, text in environ.items():
        monkeypatch.setenv(name, text)
    assert parse(["--model-name", "m"], environ, "tgis serve").num_threads == threads


def test_the_texts_tokenized_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for cpus, workers in ((1, 2), (2, 2), (4, 3), (9, 8), (64, 8)):
        monkeypatch.setattr(defaults, "usable_cpus", mock.Mock(return_value=cpus))
        assert defaults.tokenization_workers() == workers


def machine(root: Path, nodes: dict[int, str], siblings: dict[str, range] | None = None) -> Path:
    """A file system with these lists of CPUs by NUMA node, and cores of several CPUs."""
    for node, cpus in nodes.items():
        (path := root / f"sys/devices/system/node/node{node}").mkdir(parents=True)
        (path / "cpulist").write_text(cpus + "\n")
    for core, numbers in (siblings or {}).items():
        for cpu in numbers:
            (path := root / f"sys/devices/system/cpu/cpu{cpu}/topology").mkdir(parents=True)
            (path / "thread_siblings_list").write_text(core + "\n")
    return root


TWO, MIXED = {0: "0-3", 1: "4-7"}, {0: "0-1,4-5", 1: "2-3,6-7"}
PAIRS = {f"{core},{core + 4}": range(core, core + 5, 4) for core in range(4)}  # as Linux numbers hyperthreads
SHARES: dict[str, tuple[dict[int, str], dict[str, range], set[int], list[dict[int, list[int]]]]] = {
    "a node for each rank": (TWO, {}, {*range(8)}, [{0: [0, 1, 2, 3]}, {1: [4, 5, 6, 7]}]),
    "ranks that share a node": (TWO, {}, {*range(8)}, [{0: [0, 1]}, {0: [2, 3]}, {1: [4, 5]}, {1: [6, 7]}]),
    "hyperthreads stay together": (MIXED, PAIRS, {*range(8)}, [{0: [0, 4]}, {0: [1, 5]}, {1: [2, 6]}, {1: [3, 7]}]),
    "a cpuset that is uneven": (TWO, {}, {1, 2, 3, 4}, [{0: [1, 2]}, {0: [3], 1: [4]}]),
    "ranks that do not divide": (TWO, {}, {*range(8)}, [{0: [0, 1]}, {0: [2, 3], 1: [4]}, {1: [5, 6, 7]}]),
    "nodes without CPUs": ({0: "0-7", 1: "", 2: ""}, {}, {*range(8)}, [{}, {}]),
    "more ranks than cores": (TWO, {}, {0, 4}, [{}, {}, {}]),
}


@pytest.mark.parametrize(("nodes", "siblings", "cpus", "shares"), SHARES.values(), ids=SHARES)
def test_ranks_share_the_nodes(
    nodes: dict[int, str],
    siblings: dict[str, range],
    cpus: set[int],
    shares: list[dict[int, list[int]]],
    tmp_path: Path,
) -> None:
    root, count = machine(tmp_path, nodes, siblings), len(shares)
    assert [share_of_nodes(rank, count, cpus, root) for rank in range(count)] == shares
