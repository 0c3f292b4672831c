"""Servers of one model on two nodes: loopback addresses, or network namespaces that a cable joins."""

import contextlib
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from harness import server_environment, wait_until
from repository import TEST_CACHE

from tgis.pb import generation_pb2_grpc as pb_grpc

SERVE = [sys.executable, "-P", "-m", "tgis", "serve"]
_PROBES = re.compile(r"health and metrics (\d+)|probes on port (\d+)")
_GRPC = re.compile(r"gRPC (\d+) \(")


@dataclass
class Network:
    """Where nodes are: their addresses, and what runs a command there."""

    addresses: tuple[str, str] = ("127.0.0.1", "127.0.0.2")
    prefixes: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())

    def set_link(self, state: str) -> None:
        subprocess.run(["ip", "link", "set", "node0", state], check=True)


@contextlib.contextmanager
def namespaces() -> Iterator[Network]:
    """A second network namespace beside that of this process, which must be one of its own (`unshare --net`)."""
    other = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
    enter = ("nsenter", f"--net=/proc/{other.pid}/ns/net")
    try:
        while os.stat(f"/proc/{other.pid}/ns/net").st_ino == os.stat("/proc/self/ns/net").st_ino:
            time.sleep(0.01)
        for command in (
            f"ip link add node0 type veth peer name node1 netns {other.pid}",
            "ip address add 10.77.0.1/24 dev node0",
            "ip link set node0 up",
            "ip link set lo up",
        ):
            subprocess.run(command.split(), check=True)
        for command in ("address add 10.77.0.2/24 dev node1", "link set node1 up", "link set lo up"):
            subprocess.run([*enter, "ip", *command.split()], check=True)
        yield Network(("10.77.0.1", "10.77.0.2"), ((), enter))
    finally:
        other.kill()
        other.wait()


def free_port() -> int:
    with socket.create_server(("", 0)) as sock:
        port: int = sock.getsockname()[1]
    return port


@dataclass
class Node:
    """The front end of a node, its log and its termination log."""

    process: subprocess.Popen[bytes]
    address: str
    directory: Path

    @property
    def log(self) -> str:
        return (self.directory / "log").read_text()

    @property
    def reason(self) -> str:
        return (self.directory / "termination").read_text()

    def health(self) -> tuple[int, str]:
        found = _PROBES.search(self.log)
        if found is None:
            return 0, ""
        try:
            with urllib.request.urlopen(f"http://{self.address}:{found[1] or found[2]}/health", timeout=5) as answer:
                return answer.status, ""
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def pids(self) -> list[int]:
        """The processes of this node, the front end first."""
        return _descendants(self.process.pid)


@dataclass
class Cluster:
    """Nodes that may still be loading."""

    directory: Path
    network: Network
    options: dict[str, object]
    port: int = field(default_factory=free_port)
    nodes: list[Node] = field(default_factory=list)

    def start(self, number: int, **options: object) -> Node:
        address = self.network.addresses[number]
        directory = Path(tempfile.mkdtemp(prefix=f"node{number}-", dir=self.directory))
        (directory / "termination").touch()
        secret = self.directory / "secret"
        if not secret.exists():
            secret.write_text(secrets.token_hex())
        settings = {"GRPC_PORT": 0, "PORT": 0, "BIND_ADDRESS": address, "TERMINATION_LOG": directory / "termination"}
        settings |= {"ESTIMATE_MEMORY": "off", "NUM_THREADS": 1, "CACHE_DIR": TEST_CACHE, "KV_CACHE_SIZE_MB": 8}
        settings |= {"DTYPE": "float32", "CLUSTER_SECRET_PATH": secret, "NNODES": 2, "NODE_RANK": number}
        settings |= {"MASTER_PORT": self.port, "MASTER_ADDR": self.network.addresses[0]}
        with (directory / "log").open("wb") as log:
            process = subprocess.Popen(
                [*self.network.prefixes[number], *SERVE],
                env=server_environment(**settings | self.options | options),
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
        node = Node(process, address, directory)
        self.nodes.append(node)
        return node

    def wait_until_ready(self) -> None:
        def ready() -> bool:
            assert all(node.process.poll() is None for node in self.nodes), [node.log for node in self.nodes]
            return all(node.health()[0] == 200 for node in self.nodes)

        wait_until(ready, "nodes that are ready", 100)

    @contextlib.contextmanager
    def stub(self) -> Iterator[pb_grpc.GenerationServiceStub]:
        import grpc

        found = _GRPC.search(self.nodes[0].log)
        assert found is not None
        with grpc.insecure_channel(f"{self.nodes[0].address}:{found[1]}") as channel:
            yield pb_grpc.GenerationServiceStub(channel)

    def exit_codes(self, seconds: float) -> list[int]:
        """Those of all nodes, once all their processes have ended; fails after so many seconds."""
        until = time.monotonic() + seconds
        return [node.process.wait(max(until - time.monotonic(), 0.01)) for node in self.nodes]


@contextlib.contextmanager
def cluster(directory: Path, model: Path, network: Network, **options: object) -> Iterator[Cluster]:
    """A cluster without nodes; whatever has been started in it is killed at the end of the block."""
    directory.mkdir(exist_ok=True)
    found = Cluster(directory, network, {"MODEL_NAME": model, "NUM_SHARD": 2, **options})
    try:
        yield found
    finally:
        pids = [pid for node in found.nodes for pid in node.pids()]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for node in found.nodes:
            node.process.wait()


@contextlib.contextmanager
def running_cluster(directory: Path, model: Path, network: Network, **options: object) -> Iterator[Cluster]:
    """A cluster of two nodes that are ready."""
    with cluster(directory, model, network, **options) as found:
        found.start(0)
        found.start(1)
        found.wait_until_ready()
        yield found


def _descendants(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        tasks = [Path(f"/proc/{pid}/task/{task}/children") for task in os.listdir(f"/proc/{pid}/task")]
        children = [int(child) for task in tasks for child in task.read_text().split()]
        return [pid, *(each for child in children for each in _descendants(child))]
    return [pid]


def gone(pids: list[int]) -> bool:
    """Whether all have ended, or are zombies."""
    return all(_state(pid) in "ZX" for pid in pids)


def _state(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return "X"
