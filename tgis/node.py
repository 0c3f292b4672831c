"""A machine of a cluster other than node 0: its ranks, each an engine process, and a port for probes.

It ends when node 0 does: with 0 after a drain, with 1 when a rank on any machine has failed.
"""

import asyncio
import logging
import time

import msgspec

from tgis.api.http.app import HttpServer
from tgis.api.http.probes import Health
from tgis.config import Config
from tgis.errors import LOADING, SHUTTING_DOWN, StartError
from tgis.frontend.engine_process import TICK_SECONDS, EngineProcess, wait_first
from tgis.ipc.messages import EngineOptions
from tgis.limits import admission
from tgis.utils import stop_signals

log = logging.getLogger(__name__)

_EXIT_SECONDS = 5.0  # time between the exits of the first and the last rank


async def serve_node(config: Config, options: EngineOptions) -> int:
    """Serve until node 0 ends, and return 0; StartError if a rank has failed. `options` are those of the first rank."""
    return await Node(config, options).serve()


class Node:
    """One run of the ranks of this machine; create it inside the event loop."""

    def __init__(self, config: Config, options: EngineOptions) -> None:
        self._config = config
        self._ranks = {options.rank + n: EngineProcess() for n in range(options.ranks_per_node)}
        self._options = msgspec.structs.replace(options, num_threads=max(options.num_threads // len(self._ranks), 1))
        self._unhealthy_reason: str | None = LOADING

    async def serve(self) -> int:
        started = time.monotonic()
        stop, second_signal = stop_signals.futures()
        health = Health(lambda: self._unhealthy_reason)
        http = HttpServer(self._config, self._config.port, health.health_routes(), admission(self._config))
        try:
            port = await http.start()
            log.info("node %d of %d, probes on port %d", self._config.node_rank, self._config.nnodes, port)
            for number, rank in self._ranks.items():
                await rank.start(msgspec.structs.replace(self._options, rank=number))
            died = [rank.died for rank in self._ranks.values()]
            ready = asyncio.gather(*(rank.ready for rank in self._ranks.values()))
            await wait_first([ready, *died, stop])
            if ready.done() and not stop.done():
                log.info("serving rank %s after %.1f s", ", ".join(map(str, self._ranks)), time.monotonic() - started)
                await self._monitor(died, stop)
                await self._wait_for_node_0(died, second_signal)
            if failures := self._failures():
                raise StartError(failures[0])
            return 0
        finally:
            for rank in self._ranks.values():
                await rank.stop(at_once=True)
            await http.stop()
            stop_signals.ignore()

    async def _monitor(self, died: list[asyncio.Future[str]], stop: asyncio.Future[None]) -> None:
        """Return on a signal or when a rank has ended; healthy while all send heartbeats."""
        while not stop.done() and not any(each.done() for each in died):
            self._unhealthy_reason = None
            for number, rank in self._ranks.items():
                rank.watchdog.tick(time.monotonic())
                if reason := rank.watchdog.silence(time.monotonic()):
                    self._unhealthy_reason = f"rank {number}: {reason}"
            await wait_first([*died, stop], timeout=TICK_SECONDS)

    async def _wait_for_node_0(self, died: list[asyncio.Future[str]], second_signal: asyncio.Future[None]) -> None:
        """After a signal, which all nodes get together, node 0 needs the ranks until it has drained."""
        self._unhealthy_reason = SHUTTING_DOWN
        if not any(each.done() for each in died):
            log.info("waiting for node 0 to drain")
            await wait_first([*died, second_signal], timeout=self._config.shutdown_grace_seconds + _EXIT_SECONDS)
        if not self._failures():
            await asyncio.wait(died, timeout=_EXIT_SECONDS)

    def _failures(self) -> list[str]:
        ended = [(number, rank) for number, rank in self._ranks.items() if rank.died.done()]
        return [f"rank {number}: {rank.died.result()}" for number, rank in ended if rank.exit_code != 0]
