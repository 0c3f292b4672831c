"""An EngineClient without an engine process."""

from tgis.frontend.engine_client import EngineClient
from tgis.ipc.channel import FrameReader
from tgis.ipc.messages import ToEngine


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
