"""CPU quotas of control groups, read from file trees as Docker and Kubernetes show them, and NUMA nodes."""

import math
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from tables import table

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


@table("cpus", "quotas")
def test_the_quota(tmp_path: Path, row: dict[str, Any]) -> None:
    root, quota = tree(tmp_path, row["membership"], row["files"]), row["quota"]
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


def machine(root: Path, nodes: dict[int, str], siblings: dict[str, list[int]]) -> Path:
    """A file system with these lists of CPUs by NUMA node, and cores of several CPUs."""
    for node, cpus in nodes.items():
        (path := root / f"sys/devices/system/node/node{node}").mkdir(parents=True)
        (path / "cpulist").write_text(cpus + "\n")
    for core, numbers in siblings.items():
        for cpu in numbers:
            (path := root / f"sys/devices/system/cpu/cpu{cpu}/topology").mkdir(parents=True)
            (path / "thread_siblings_list").write_text(core + "\n")
    return root


@table("cpus", "nodes")
def test_ranks_share_the_nodes(row: dict[str, Any], tmp_path: Path) -> None:
    root, count = machine(tmp_path, row["nodes"], row["siblings"]), len(row["shares"])
    assert [share_of_nodes(rank, count, row["cpus"], root) for rank in range(count)] == row["shares"]
