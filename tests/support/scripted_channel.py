"""The engine core in the process of a test, with messages that the test writes."""

from typing import Any

from batches import EOS

from tgis.batcher.batcher import Batcher
from tgis.batcher.capacity import BatchLimits
from tgis.engine_core.core import EngineCore
from tgis.engine_core.lookups import LookupTable
from tgis.engines.base import Engine
from tgis.ipc.channel import FrameReader, encode_frame
from tgis.ipc.messages import FromEngine, Shutdown


class ScriptedChannel:
    """Gives the engine these messages, one turn before each step, and keeps what it sends as the front end reads it."""

    def __init__(self, *turns: list[Any]) -> None:
        self._turns = list(turns)
        self._reader = FrameReader(FromEngine)
        self.frames: list[int] = []
        self.messages: list[Any] = []
        self.timeouts: list[float | None] = []

    def receive(self, *, timeout: float | None = None) -> list[Any]:
        self.timeouts.append(timeout)
        return self._turns.pop(0) if self._turns else [] if timeout == 0 else [Shutdown()]

    def send(self, message: Any) -> None:
        frame = encode_frame(message)
        self.frames.append(len(frame))
        self.messages += self._reader.feed(frame)


def run_core(channel: Any, engine: Engine, limits: BatchLimits, lookups: Any = None, idle_seconds: float = 0) -> None:
    EngineCore(channel, engine, Batcher(limits, {EOS}), lookups or LookupTable(channel.send), idle_seconds).run()
