"""tgis.server: what ends a start that waits for an adapter of LORA_MODULES; how the engine is watched."""

import asyncio
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from config_parsing import read
from harness import run_async

from demo.fake_model import make_fake_model
from tgis import server as server_module
from tgis.errors import StartError
from tgis.frontend.engine_client import EngineClient
from tgis.frontend.engine_process import EngineWatchdog
from tgis.ipc.messages import EngineInfo, Ready
from tgis.server import Server, prepare

INFO = EngineInfo("x", "X", "cpu", "float32", 257, False, False, 4, 1000, 64, lora_targets={"q_proj": (8, 8)})


class Waits:
    """An engine's transport; `asked` is done when it has been asked for an adapter."""

    def __init__(self) -> None:
        self.asked: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def write(self, data: bytes) -> None:
        if b"look_up" in data and not self.asked.done():
            self.asked.set_result(None)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setattr(server_module, "ADAPTER_TIMEOUT", 1e6)
    model, adapter = make_fake_model(tmp_path / "model"), tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    options = {"MODEL_NAME": str(model), "DEPLOYMENT_FRAMEWORK": "fake", "CACHE_DIR": str(tmp_path)}
    return prepare(read(**options, LORA_MODULES=f"x={adapter}"))


async def waiting(server: Server, stop: asyncio.Future[None]) -> tuple[EngineClient, "asyncio.Task[Any]"]:
    """A start that has asked the engine for the adapter."""
    client, transport = EngineClient(), Waits()
    client._transport = transport  # type: ignore[assignment]
    client.handle(Ready(INFO))
    start = asyncio.create_task(server._wait_until_ready(client, stop))
    await transport.asked
    return client, start


@run_async
async def test_a_signal_does(server: Server) -> None:
    stop = asyncio.get_running_loop().create_future()
    _, start = await waiting(server, stop)
    stop.set_result(None)
    assert await start is None


@run_async
async def test_the_end_of_the_engine_does_and_is_the_reason(server: Server) -> None:
    client, start = await waiting(server, asyncio.get_running_loop().create_future())
    client._process = mock.Mock(wait=mock.AsyncMock(return_value=-9))
    client.connection_lost(None)
    with pytest.raises(StartError, match="signal 9"):
        await start or server._exit_code(client, asyncio.get_running_loop().create_future())


@run_async
async def test_a_long_start_is_no_pause(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    client, loop = EngineClient(), asyncio.get_running_loop()
    client.watchdog = EngineWatchdog(time.monotonic() - 100)
    stop = loop.create_future()
    loop.call_soon(stop.set_result, None)
    await server._monitor(mock.Mock(), client, stop)
    assert not any("did not run" in message for message in caplog.messages)
