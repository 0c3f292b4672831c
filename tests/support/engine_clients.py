"""An EngineClient without an engine process, and outputs of calls that nobody makes text of."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from tgis.frontend.engine_client import EngineClient
from tgis.frontend.output import Output
from tgis.frontend.params import Params
from tgis.ipc.channel import FrameReader
from tgis.ipc.messages import ToEngine
from tgis.ipc.request import Request

_DECODER: Any = SimpleNamespace(tokenizer=None, splits_graphemes=False, replaces_each_byte=False)
_PARAMS = Params(max_new_tokens=20, include_stop_sequence=True)


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


def connected_client() -> tuple[EngineClient, FakeTransport]:
    client, transport = EngineClient(), FakeTransport()
    client._transport = transport  # type: ignore[assignment]
    client._process = ExitedProcess()  # type: ignore[assignment]
    return client, transport


def outputs(requests: Iterable[Request], arrived: float = 0.0) -> list[Output]:
    return [
        Output(request, index, "", _PARAMS, _DECODER, arrived=arrived, separator="")
        for index, request in enumerate(requests)
    ]
