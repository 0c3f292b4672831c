"""tgis.node: when the ranks of a machine serve, and what ends them how."""

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from batches import engine_options
from engine_clients import INFO
from harness import run_async
from http_port import exchange

from tgis import node as node_module
from tgis.config import Config
from tgis.errors import LOADING, SHUTTING_DOWN, StartError
from tgis.frontend.engine_process import EngineProcess
from tgis.ipc.messages import EngineOptions, Ready
from tgis.node import serve_node

READY = [((2, "ready"), LOADING), ((3, "ready"), None)]
SILENT = [((3, "no heartbeat"), "rank 3: no heartbeat"), ((3, None), None)]


class Rank(EngineProcess):
    """A rank without a process."""

    exit_code: int | None = None

    async def start(self, options: EngineOptions) -> int:
        self.options = options
        ranks[options.rank] = self
        return 0

    async def stop(self, *, at_once: bool = False) -> None:
        self.stopped = at_once


ranks: dict[int, Rank] = {}


async def health(port: int) -> str | None:
    head, _, body = (await exchange(port, b"GET /health HTTP/1.0\r\nHost: localhost\r\n\r\n")).partition(b"\r\n\r\n")
    return None if b" 200 " in head else json.loads(body)["error"]


def happen(event: Any) -> None:
    """A signal, or what becomes of a rank: ready, an exit code, or why it is silent."""
    if isinstance(event, signal.Signals):
        os.kill(os.getpid(), event)
    elif event[1] == "ready":
        ranks[event[0]].handle(Ready(INFO))
    elif isinstance(event[1], int):
        ranks[event[0]].exit_code = event[1]
        ranks[event[0]].died.set_result("it ended")
    else:
        ticks: list[float] = []
        silence = lambda now: event[1] if ticks else None  # noqa: E731
        ranks[event[0]].watchdog = mock.Mock(tick=ticks.append, silence=silence)


SERVING, WAITING = "serving rank 2, 3", "waiting for node 0 to drain"
TERM, DRAIN = (signal.SIGTERM, SHUTTING_DOWN), (signal.SIGHUP, SHUTTING_DOWN)


@pytest.mark.parametrize(
    "case",
    [
        ([], [signal.SIGTERM], (60, 60), [], 0),
        ([((2, "ready"), LOADING)], [(3, "ready"), signal.SIGTERM], (60, 60), [], 0),
        ([((2, "ready"), LOADING)], [(3, 1)], (60, 60), [], "rank 3: it ended"),
        (READY, [signal.SIGTERM], (0.01, 0), [SERVING, WAITING], 0),
        (READY, [(2, 1), (3, 1)], (60, 60), [SERVING], "rank 2: it ended"),
        ([*READY, ((2, 0), SHUTTING_DOWN)], [(3, 0)], (60, 60), [SERVING], 0),
        ([*READY, ((2, 0), SHUTTING_DOWN)], [(3, -9)], (60, 60), [SERVING], "rank 3: it ended"),
        ([*READY, *SILENT, TERM], [(2, 0), (3, 0)], (0.01, 60), [SERVING, WAITING], 0),
        ([*READY, DRAIN], [signal.SIGINT], (0.01, 60), [SERVING, WAITING], 0),
    ],
)
@run_async
async def test_a_node_serves_until_node_0_ends(case: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """After each event the node is unhealthy for a reason. Only `ends` end it, within a time for exits and a grace."""
    events, ends, (exit_seconds, grace), logged, outcome = case
    monkeypatch.setattr(node_module, "EngineProcess", Rank)
    monkeypatch.setattr(node_module, "TICK_SECONDS", 0.001)
    monkeypatch.setattr(node_module, "_EXIT_SECONDS", exit_seconds)
    caplog.set_level("INFO", "tgis.node")
    ranks.clear()
    options = engine_options(Path("m"), num_threads=3 if logged else 1, num_shards=4, nnodes=2, rank=2, node_rank=1)
    ports: dict[str, Any] = {"bind_address": "127.0.0.1", "port": 0}
    config = Config(model_name="m", nnodes=2, node_rank=1, shutdown_grace_seconds=grace, **ports)
    serving = asyncio.create_task(serve_node(config, options))
    while len(ranks) < 2 and not serving.done():
        await asyncio.sleep(0)
    assert {number: rank.options.num_threads for number, rank in ranks.items()} == {2: 1, 3: 1}
    port = int(caplog.messages[0].removeprefix("node 1 of 2, probes on port "))
    for event, reason in [(None, LOADING), *events]:
        if event:
            happen(event)
        while await health(port) != reason:
            assert not serving.done()
    await asyncio.sleep(0.03)
    assert await health(port) == reason
    for event in ends:
        happen(event)
    (result,) = await asyncio.gather(serving, return_exceptions=True)
    assert outcome == (str(result) if isinstance(result, StartError) else result)
    assert all(rank.stopped for rank in ranks.values())
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    assert [line.partition(" after ")[0] for line in caplog.messages[1:]] == logged
    with pytest.raises(ConnectionRefusedError):
        await health(port)
