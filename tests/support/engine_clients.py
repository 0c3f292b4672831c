"""An EngineClient without an engine process, and outputs of calls that nobody makes text of."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from scraped_metrics import make_metrics

from tgis.frontend.engine_client import EngineClient
from tgis.frontend.engine_output import EngineOutput, ReadyOutputs
from tgis.frontend.engine_process import EngineProcess
from tgis.frontend.metrics import Metrics
from tgis.frontend.output import Output
from tgis.frontend.params import Params
from tgis.ipc.channel import FrameReader
from tgis.ipc.messages import EngineInfo, Ready, ToEngine
from tgis.ipc.request import Request

_DECODER: Any = SimpleNamespace(tokenizer=None, splits_graphemes=False, replaces_each_byte=False)
_PARAMS = Params(max_new_tokens=20, include_stop_sequence=True)
INFO = EngineInfo("fake", "Fake", "none", "none", 257, False, False, 4, 1000, 64, kv_cache_bytes=1 << 20)


class FakeTransport:
    """Collects what the client sends; stands in for its transport."""

    def __init__(self) -> None:
        self.sent: list[ToEngine] = []
        self._reader = FrameReader(ToEngine)

    def write(self, data: bytes) -> None:
        self.sent += self._reader.feed(data)


class ExitedProcess:
    """Stands in for the engine process after its end."""

    async def wait(self) -> int:
        return -11


def connected_process() -> tuple[EngineProcess, FakeTransport]:
    process, transport = EngineProcess(), FakeTransport()
    process._transport = transport  # type: ignore[assignment]
    process._process = ExitedProcess()  # type: ignore[assignment]
    return process, transport


def connected_client(metrics: Metrics | None = None) -> tuple[EngineClient, FakeTransport]:
    """A client of an engine that is ready."""
    process, transport = connected_process()
    process.handle(Ready(INFO))
    return EngineClient(process, metrics or make_metrics()), transport


def engine_outputs(requests: Iterable[Request], arrived: float = 0.0, *, eager: bool = True) -> list[EngineOutput]:
    """The outputs of a call."""
    ready = ReadyOutputs(eager=eager)
    return [EngineOutput(request, index, ready, arrived) for index, request in enumerate(requests)]


def outputs(requests: Iterable[Request]) -> list[Output]:
    return [Output(engine_output, "", _PARAMS, _DECODER, "") for engine_output in engine_outputs(requests)]
