"""Runs `tgis serve` as a child process for a benchmark."""

import contextlib
import os
import platform
import random
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tgis.bench.measure import cpu_seconds
from tgis.errors import StartError

START_SECONDS = 200.0
STOP_SECONDS = 60.0
_PORTS = range(20000, 32000)  # below the ephemeral ports, so that no client's connection takes one first


@dataclass(frozen=True, slots=True)
class Server:
    """A server that has answered 200 on /health."""

    process: subprocess.Popen[bytes]
    target: str  # host:port of gRPC
    http_port: int
    start_seconds: float

    @property
    def pid(self) -> int:
        """The process id of the front end."""
        return self.process.pid

    def engine_pid(self) -> int:
        """The process id of the engine process."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        (pid,) = [int(c) for c in children if b"tgis.engine_core.main" in Path(f"/proc/{c}/cmdline").read_bytes()]
        return pid

    def cpu_seconds(self) -> float:
        """CPU time of the front-end process so far."""
        return cpu_seconds(self.pid)

    def metrics(self) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.http_port}/metrics", timeout=10) as answer:
            text: str = answer.read().decode()
            return text

    def healthy(self) -> bool:
        return _is_healthy(self.http_port)

    def stop(self) -> int:
        """Send SIGTERM and return the exit code."""
        self.process.terminate()
        return self.process.wait(STOP_SECONDS)


@contextlib.contextmanager
def running_server(
    model: Path,
    cache: Path,
    *options: str,
    log: Path | None = None,
    python: str = sys.executable,
    directory: Path | None = None,
    ports: tuple[int, ...] | None = None,
) -> Iterator[Server]:
    """Serve `model` until the end of the block; logs to a file, or else only warnings to stderr.

    `directory` is the checkout whose code is served, if not that of the environment; `ports` are of gRPC and HTTP.
    """
    grpc_port, http_port = ports or free_ports()
    command = [python, "-m", "tgis", "serve", "--model-name", str(model), "--cache-dir", str(cache)]
    command += ["--grpc-port", str(grpc_port), "--port", str(http_port), "--bind-address", "127.0.0.1"]
    command += [] if log else ["--log-level", "warning"]
    environment = os.environ | ({"PYTHONPATH": str(directory)} if directory else {})
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(log.open("wb")) if log else None
        process = stack.enter_context(
            subprocess.Popen([*command, *options], stdout=output, stderr=output, cwd=directory, env=environment)
        )
        stack.callback(_terminate, process)
        while not _is_healthy(http_port):
            if process.poll() is not None or time.monotonic() - started > START_SECONDS:
                raise StartError(f"tgis serve does not start{f', see {log}' if log else ''}")
            time.sleep(0.05)
        yield Server(process, f"127.0.0.1:{grpc_port}", http_port, time.monotonic() - started)


def _terminate(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()


def free_ports(count: int = 2) -> tuple[int, ...]:
    """Free ports next to each other."""
    for port in random.sample(_PORTS[::count], len(_PORTS) // count):
        ports = tuple(range(port, port + count))
        if all(map(_is_free, ports)):
            return ports
    raise StartError(f"no free ports from {_PORTS.start} to {_PORTS.stop}")


def cpu_name() -> str:
    """What figures of this machine are told with."""
    lines = (line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines())
    return next((value.strip() for name, _, value in lines if name.strip() == "model name"), platform.machine())


def git_revision() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, check=True, cwd=Path(__file__).parent, capture_output=True, text=True)
    return done.stdout.strip()


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def _is_healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return False
