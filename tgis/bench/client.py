"""The settings of a run, and the record of each request."""

import math
from dataclasses import dataclass
from pathlib import Path

from tgis.bench.load import ClosedLoop, Level

STREAMS_PER_CONNECTION = 100  # a common limit of servers
OPEN_LOOP_CONNECTIONS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSettings:
    """What to measure; lengths in tokens, times in seconds."""

    target: str
    levels: tuple[Level, ...] = (ClosedLoop(1),)
    requests: int | None = None  # per level; None: as many as fit `duration`
    duration: float | None = None
    prompts: Path | None = None  # None: random words
    input_tokens: int = 128
    output_tokens: int = 128
    warmup: int = 1  # requests before each level
    seed: int = 0
    server_pid: int | None = None  # process on this machine whose CPU time is measured
    stream: bool = True
    ignore_eos: bool = True
    adapter_id: str | None = None
    prefix_id: str | None = None
    timeout: float = 600.0  # seconds, per request

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
    first_message_tokens: float = 0  # tokens in the first message with output
    output_tokens: int = 0
    input_tokens: int = 0
    status: str = ""
    detail: str = ""  # the server's error message

    def record_output(self, now: float, tokens: int) -> None:
        """Record a message of a stream that has output; `tokens` counts all so far."""
        if not self.first_output_at:
            self.first_output_at, self.first_message_tokens = now, tokens
        elif now - self.last_output_at > self.max_gap:
            self.max_gap = now - self.last_output_at
        self.last_output_at, self.output_tokens = now, tokens

    def succeed(self, now: float) -> None:
        self.ended_at, self.status = now, "OK"

    def fail(self, now: float, status: str, detail: str) -> None:
        self.ended_at, self.status, self.detail = now, status, detail
