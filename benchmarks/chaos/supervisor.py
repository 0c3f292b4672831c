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
        self.ports = free_ports()
        grpc_port, http_port = map(str, self.ports)
        self._command = [sys.executable, "-P", "-m", "tgis", "serve", "--grpc-port", grpc_port, "--port", http_port]
        self._command += ["--bind-address", "127.0.0.1", *options]
        self._environment = environment
        self._stopping = False
        self.log_flows = threading.Event()  # cleared: nobody reads the log
        self.log_flows.set()
        self.may_exit = False  # True while a fault ends processes
        self.lives = 0
        self.exits: list[str] = []  # unexpected ones, and tracebacks
        self._tail: collections.deque[str] = collections.deque(maxlen=_KEPT_LINES)
        self.server = self._start()

    async def run(self) -> None:
        """Restart the server until `stop`."""
        while not self._stopping:
            if (code := self.server.process.poll()) is not None:
                if not self.may_exit:
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
        return Server(process, f"localhost:{self.ports[0]}", self.ports[1], 0.0)

    def _read_log(self, pipe: IO[bytes]) -> None:
        with suppress(ValueError):  # the pipe was closed
            for line in pipe:
                self._tail.append(line.decode(errors="replace").rstrip())
                if line.startswith(b"Traceback") and not self.may_exit:
                    self.exits.append(f"a traceback in the log: {' | '.join(self._tail)}")
                self.log_flows.wait()
