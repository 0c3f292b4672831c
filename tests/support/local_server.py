"""A server with the engine `fake` in this process: threads in place of processes, which take seconds to start.

It runs `tgis.server.Server.serve` as a process does; only signals and the start of the engine process are replaced.
Tests beside it open no `grpc.aio` channels: two event loops of gRPC in a process disturb each other.
"""

import asyncio
import contextlib
import logging
import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import config_parsing
import harness
import uvloop
from repository import TEST_CACHE

from tgis import server as server_module
from tgis.config import Config
from tgis.engine_core.main import _serve as serve_engine
from tgis.frontend.engine_process import EngineProcess
from tgis.ipc.channel import Channel
from tgis.ipc.messages import EngineOptions, Shutdown, ToEngine
from tgis.prepare import prepare
from tgis.utils import logs, stop_signals


class EngineThread(EngineProcess):
    """The engine process as a thread, without heartbeats."""

    async def start(self, options: EngineOptions) -> int:
        self.watchdog.silence = lambda now: None  # type: ignore[method-assign]
        ours, theirs = socket.socketpair()
        channel = Channel(theirs, ToEngine, lambda _reason: None)
        self._thread = threading.Thread(target=serve_engine, args=(channel, options, []))
        self._thread.start()
        self._transport, _ = await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=ours)
        self._socket = theirs
        return os.getpid()

    async def stop(self, *, at_once: bool = False) -> None:
        self.send(Shutdown())
        await asyncio.to_thread(self._thread.join)
        assert self._transport is not None
        self._transport.close()
        self._socket.close()

    def connection_lost(self, _exc: Exception | None) -> None:
        self.dead = True


@dataclass
class LocalServer(harness.Server):
    """A server in a thread of this process, and the event loop that it runs in."""

    loop: asyncio.AbstractEventLoop
    stop_signal: "asyncio.Future[None]"

    def begin_stop(self) -> None:
        """What SIGTERM does."""

        def signal() -> None:
            if not self.stop_signal.done():
                self.stop_signal.set_result(None)

        self.loop.call_soon_threadsafe(signal)


def local_server(
    directory: Path, steps: dict[str, Any] | None = None, template: str | None = None, /, **options: object
) -> contextlib.AbstractContextManager[LocalServer]:
    """Serve a model of the engine `fake`, which repeats its prompt."""
    return serving_locally(directory, harness.fake_model(directory, steps, template), **options)


@contextlib.contextmanager
def serving_locally(directory: Path, model: Path, **options: object) -> Iterator[LocalServer]:
    """Serve a directory with a model of the engine `fake`; the log goes to a file."""
    settings = {"MODEL_NAME": model, "DEPLOYMENT_FRAMEWORK": "fake", "BIND_ADDRESS": "127.0.0.1", "GRPC_PORT": 0}
    settings |= {"PORT": 0, "CACHE_DIR": TEST_CACHE} | options
    config = config_parsing.read(**{name: str(value) for name, value in settings.items()})
    started = Future[LocalServer]()

    def run() -> None:
        try:
            uvloop.run(_serve(config, directory / "server.log", started))
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)

    thread = threading.Thread(target=run)
    with _log_to(directory / "server.log", json_output=config.json_output):
        thread.start()
        running = started.result()
        try:
            yield running
        finally:
            running.begin_stop()
            thread.join()


async def _serve(config: Config, log: Path, started: "Future[LocalServer]") -> None:
    loop, process = asyncio.get_running_loop(), mock.Mock()
    stop_signal, second_signal = loop.create_future(), loop.create_future()
    with (
        mock.patch.object(server_module, "EngineProcess", EngineThread),
        mock.patch.object(stop_signals, "futures", return_value=(stop_signal, second_signal)),
        mock.patch.object(stop_signals, "ignore") as ignore,
    ):
        server = server_module.Server(prepare(config))
        start_serving = server._start_serving

        def report(ports: tuple[int, int, int | None]) -> None:
            start_serving(ports)
            started.set_result(LocalServer(process, *ports, log, loop, stop_signal))

        server._start_serving = report  # type: ignore[method-assign]
        assert await server.serve() == 0
        ignore.assert_called_once()


@contextlib.contextmanager
def _log_to(path: Path, *, json_output: bool) -> Iterator[None]:
    handler, logger = logging.FileHandler(path), logging.getLogger("tgis")
    handler.setFormatter((logs.JsonFormatter if json_output else logs.TextFormatter)(None))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        handler.close()
