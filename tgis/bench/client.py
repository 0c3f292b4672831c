"""What the load generator is to measure, and what it records of each request."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tgis.bench.load import ClosedLoop, Level

_SETUP_TIMEOUT = 30.0
STREAMS_PER_CONNECTION = 100  # a common limit of servers
OPEN_LOOP_CONNECTIONS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSettings:
    """What to measure; lengths in tokens, times in seconds."""

    api: str = "grpc"  # grpc, tgi or openai
    target: str
    levels: tuple[Level, ...] = (ClosedLoop(1),)
    requests: int | None = None  # of each level; None: as many as fit `duration`
    duration: float | None = None
    prompts: Path | None = None  # None: random words
    input_tokens: int = 128
    output_tokens: int = 128
    warmup: int = 1  # requests before each level
    seed: int = 0
    server_pid: int | None = None  # of a process on this machine
    metrics: str | None = None  # URL of the server's /metrics
    slo: Mapping[str, float] | None = None  # service level objectives: milliseconds, by name of `request_times`
    stream: bool = True
    ignore_eos: bool = True
    chat: bool = False  # OpenAI's API: chat completions, not completions
    model: str | None = None  # of reports over gRPC; of requests in OpenAI's API, None: the first that the server names
    adapter_id: str | None = None
    prefix_id: str | None = None
    timeout: float = 600.0  # seconds that each request may take

    @property
    def setup_timeout(self) -> float:
        """Seconds that the first call may take, by which the server is found."""
        return min(_SETUP_TIMEOUT, self.timeout)

    @property
    def connections(self) -> int:
        """Enough that no request waits for a free HTTP/2 stream."""
        closed = [level.value for level in self.levels if isinstance(level, ClosedLoop)]
        return math.ceil(max(closed) / STREAMS_PER_CONNECTION) if closed else OPEN_LOOP_CONNECTIONS


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


class FailedAnswer(Exception):
    """The answer is an error; `status` is counted, the text is an example of it."""

    def __init__(self, status: str, detail: str) -> None:
        super().__init__(detail)
        self.status = status
