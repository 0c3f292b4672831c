"""What the load generator asks of a server, whatever its API, and what it records of each request."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tgis.bench.workload import BenchRequest

SETUP_TIMEOUT = 30.0


@dataclass(frozen=True, slots=True)
class CallOptions:
    """Options that all requests of a run share."""

    stream: bool = True
    ignore_eos: bool = True
    chat: bool = False  # OpenAI's API: chat completions, not completions
    model: str | None = None  # OpenAI's API; None: the first that the server names
    adapter_id: str | None = None
    prefix_id: str | None = None
    timeout: float = 600.0  # seconds that each request may take


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The server's description of its model; fields that it does not report are None."""

    name: str | None = None
    kind: str | None = None
    max_sequence_length: int | None = None
    max_new_tokens: int | None = None


@dataclass(slots=True)
class RequestRecord:
    """One request; the figures are computed afterwards.

    Times are seconds of `perf_counter`; status "" means unfinished.
    """

    scheduled_at: float  # according to the load
    requested_tokens: int  # output tokens wanted
    sent_at: float = 0.0
    first_output_at: float = 0.0  # 0: no output yet; always in unary calls
    last_output_at: float = 0.0
    ended_at: float = 0.0
    max_gap: float = 0.0  # longest time between two messages with output
    num_messages: int = 0  # with output
    first_message_tokens: float = 0  # in the first of them; their mean where only the total is known
    output_tokens: int = 0
    input_tokens: int = 0
    counts_events: bool = False  # the server has not said how many tokens there are: a message counts as one
    status: str = ""
    detail: str = ""  # the server's error message

    def record_output(self, now: float, tokens: int) -> None:
        """Record a message of a stream that has output; `tokens` counts all so far."""
        if not self.first_output_at:
            self.first_output_at, self.first_message_tokens = now, tokens
        elif now - self.last_output_at > self.max_gap:
            self.max_gap = now - self.last_output_at
        self.last_output_at, self.output_tokens = now, tokens
        self.num_messages += 1

    def succeed(self, now: float) -> None:
        self.ended_at, self.status = now, "OK"

    def fail(self, now: float, status: str, detail: str) -> None:
        self.ended_at, self.status, self.detail = now, status, detail


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
