"""Runs the server as Kubernetes does: restarts it whenever it exits, and collects its log."""

import asyncio
import collections
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO

from benchmarks.serving import START_SECONDS, STOP_SECONDS, Server, free_ports

_RESTART_SECONDS = 0.5
_KEPT_LINES = 60


class Supervisor:
    """The server of a soak, on the same ports in each of its lives."""

    def __init__(self, options: Sequence[str], environment: Mapping[str, str]) -> None:
        self.grpc_port, self.http_port, self.api_port = free_ports(3)
        ports = {"grpc-port": self.grpc_port, "port": self.http_port, "http-api-port": self.api_port}
        self._command = [sys.executable, "-P", "-m", "tgis", "serve", "--bind-address", "127.0.0.1", *options]
        self._command += [f"--{name}={port}" for name, port in ports.items()]
        self._environment = environment
        self._stopping = False
        self.log_flows = threading.Event()  # cleared: nobody reads the log
        self.log_flows.set()
        self.exit_codes: frozenset[int] = frozenset()  # that a fault may bring
        self.may_trace: tuple[str, ...] = ()  # what the last lines of a fault's tracebacks have
        self.lives = 0
        self.exits: list[str] = []  # unexpected ones, and tracebacks
        self._tail: collections.deque[str] = collections.deque(maxlen=_KEPT_LINES)
        self.server = self._start()

    async def run(self) -> None:
        """Restart the server until `stop`."""
        while not self._stopping:
            if (code := self.server.process.poll()) is not None:
                if code not in self.exit_codes:
                    self.exits.append(f"the server exited with {code}: {' | '.join(self._tail)}")
                await asyncio.sleep(_RESTART_SECONDS)
                self.server = self._start()
            await asyncio.sleep(0.02)

    async def wait_ready(self) -> None:
        """Wait until /health is 200."""
        until = time.monotonic() + START_SECONDS
        while not await asyncio.to_thread(self.server.healthy):
            assert time.monotonic() < until, f"no healthy server: {' | '.join(self._tail)}"
            await asyncio.sleep(0.05)

    def stop(self) -> int:
        """Stop the server for good and return its exit code."""
        self._stopping = True
        self.log_flows.set()
        try:
            return self.server.stop()
        except subprocess.TimeoutExpired:
            self.server.process.kill()
            return self.server.process.wait(STOP_SECONDS)

    def _start(self) -> Server:
        self.lives += 1
        process = subprocess.Popen(
            self._command, env=self._environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        assert process.stdout is not None
        threading.Thread(target=self._read_log, args=(process.stdout,), daemon=True).start()
        return Server(process, f"localhost:{self.grpc_port}", self.http_port, 0.0)

    def _read_log(self, pipe: IO[bytes]) -> None:
        with suppress(ValueError):  # the pipe was closed
            traceback: list[str] = []  # its lines so far: the last one is as deep as the first one
            for line in pipe:
                text = line.decode(errors="replace").rstrip()
                if "Traceback (most recent call last)" in text:
                    traceback = [self._tail[-1] if self._tail else "", text]
                elif traceback:
                    traceback.append(text)
                    if _depth(text) <= _depth(traceback[1]):
                        if not any(name in text for name in self.may_trace):
                            self.exits.append(f"a traceback in the log: {' | '.join(traceback)}")
                        traceback = []
                self._tail.append(text)
                self.log_flows.wait()


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip())
