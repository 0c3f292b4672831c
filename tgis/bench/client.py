"""What the load generator asks of a server, whatever its API."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tgis.bench.record import RequestRecord
from tgis.bench.workload import BenchRequest

SETUP_TIMEOUT = 30.0


@dataclass(frozen=True, slots=True)
class CallOptions:
    """What is the same for all requests of a run."""

    stream: bool = True
    ignore_eos: bool = True
    chat: bool = False  # OpenAI's API: chat completions, not completions
    model: str | None = None  # OpenAI's API; None: the first that the server names
    adapter_id: str | None = None
    prefix_id: str | None = None
    timeout: float = 600.0  # seconds that each request may take


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the server says about its model; None for what it does not say."""

    name: str | None = None
    kind: str | None = None
    max_sequence_length: int | None = None
    max_new_tokens: int | None = None


class Client(Protocol):
    """Calls one server."""

    async def served_model(self) -> ServedModel:
        """Connects; StartError or RpcError if the server does not answer."""
        ...

    async def token_counts(self, texts: Sequence[str]) -> list[int] | None:
        """Tokens of a request with each text as its prompt, all that is around it included; None if unknown."""
        ...

    async def send(self, job: BenchRequest, record: RequestRecord) -> None:
        """Send a request and fill in its record."""
        ...
