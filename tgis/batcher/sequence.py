"""One request for its whole life beside the engine, and the plan of one step over several of them.

There is no prefill phase and no decode phase: a sequence has `len(tokens)` tokens of which `computed` are in
the engine's KV cache, and a plan says how many more each row computes.
"""

from dataclasses import dataclass, field

from tgis.messages import Request, StopReason


@dataclass(slots=True, eq=False)
class Sequence:
    """State of one request: its tokens, how far they are computed, and how it ended."""

    request: Request
    queued_at: float
    tokens: list[int] = field(init=False)  # prompt, then generated
    prompt_length: int = field(init=False)
    computed: int = 0
    end: StopReason = StopReason.NOT_FINISHED

    def __post_init__(self) -> None:
        self.tokens = list(self.request.tokens)
        self.prompt_length = len(self.tokens)

    @property
    def id(self) -> int:
        """The request's id."""
        return self.request.id

    @property
    def generated(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.prompt_length

    @property
    def remaining(self) -> int:
        """Tokens that may still be generated."""
        return self.request.max_new_tokens - self.generated

    @property
    def pending(self) -> int:
        """Tokens not computed yet; 1 for a row that decodes."""
        return len(self.tokens) - self.computed


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: every row computes its pending tokens and gets one new token."""

    rows: list[Sequence]
    prefill: bool  # whether the rows are new to the engine
