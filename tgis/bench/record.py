"""What one request has shown so far. Per message it only keeps a few numbers; the figures are computed afterwards."""

from dataclasses import dataclass


@dataclass(slots=True)
class RequestRecord:
    """One request. Times are seconds of `perf_counter`; status "" means unfinished."""

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
        """Record a message of a stream that has output, which makes so many tokens in all."""
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
