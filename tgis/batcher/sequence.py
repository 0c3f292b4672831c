"""One request for its whole life beside the engine, and the plan of one step over several of them.

There is no prefill phase and no decode phase: a sequence has `len(tokens)` tokens of which `computed` are in
the engine's KV cache, and a plan says how many more each row computes.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Self

from tgis.ipc.request import Request, StopReason


@dataclass(slots=True, eq=False)
class Sequence:
    """State of one request: its tokens, how far they are computed, and how it ended."""

    request: Request
    arrival_time: float
    tokens: list[int] = field(init=False)  # prompt, then generated
    prompt_length: int = field(init=False)
    max_length: int = field(init=False)  # tokens at the most
    num_computed_tokens: int = 0
    was_scheduled: bool = False  # whether it has ever been in the batch of a step that succeeded
    solo_failures: int = 0  # steps in a row that failed with this row alone
    retry_group: int = 0  # after a failed step: only rows of the same trial share its next step; 0 is none
    stop_reason: StopReason = StopReason.NOT_FINISHED
    block_table: list[int] = field(default_factory=list)  # of a paged KV cache, in the order of the tokens
    block_hashes: list[bytes] = field(default_factory=list)  # what names the content of each full block
    num_cached_blocks: int = 0  # full blocks that others may find
    adapter: Any = None  # the row's soft prompt or adapter, as the engine takes it; the batcher never looks

    def __post_init__(self) -> None:
        self.tokens = list(self.request.tokens)
        self.prompt_length = len(self.tokens)
        self.max_length = self.prompt_length + self.request.max_new_tokens

    @property
    def id(self) -> int:
        """The request's id."""
        return self.request.id

    @property
    def arrival_order(self) -> tuple[float, int]:
        """Sorts the oldest first."""
        return self.arrival_time, self.id

    @property
    def num_generated_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.prompt_length

    @property
    def num_remaining_tokens(self) -> int:
        """Tokens that may still be generated."""
        return self.max_length - len(self.tokens)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens not computed yet; 1 for a row that decodes."""
        return len(self.tokens) - self.num_computed_tokens

    @property
    def decoding(self) -> bool:
        """Whether the engine has all of its tokens but the newest."""
        return 0 < self.num_computed_tokens == len(self.tokens) - 1

    def expired(self, now: float) -> bool:
        """Whether its deadline has passed."""
        return self.request.deadline is not None and now > self.request.deadline


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: which rows, how many of its pending tokens each computes, and who gets a new token by it."""

    seqs: list[Sequence]
    num_scheduled_tokens: list[int]
    sampled: list[Sequence]  # the rows that have no token pending afterwards
    has_prefill: bool  # whether some row does more than decode
    to_release: tuple[Sequence, ...] = ()  # left the batch since the last plan; some may be scheduled again by this one

    @property
    def num_prefill_tokens(self) -> list[int]:
        """How many tokens each row computes that does more than decode; not to be asked after the step."""
        if not self.has_prefill:
            return []
        return [count for row, count in zip(self.seqs, self.num_scheduled_tokens, strict=True) if not row.decoding]

    @classmethod
    def of(cls, seqs: list[Sequence], counts: list[int], to_release: Iterable[Sequence] = ()) -> Self:
        """A step in which each sequence computes its count of tokens."""
        sampled = [seq for seq, count in zip(seqs, counts, strict=True) if count == seq.num_uncomputed_tokens]
        prefill = not all(seq.decoding for seq in seqs)
        return cls(seqs, counts, sampled, prefill, tuple(to_release))

    @classmethod
    def compute_all(cls, seqs: list[Sequence]) -> Self:
        """A step in which each sequence computes all its uncomputed tokens."""
        return cls.of(seqs, [seq.num_uncomputed_tokens for seq in seqs])

    def without(self, ids: Collection[int]) -> Self:
        """The same step without the sequences of these requests."""
        work = zip(self.seqs, self.num_scheduled_tokens, strict=True)
        kept = [(seq, count) for seq, count in work if seq.id not in ids]
        return replace(
            self,
            seqs=[seq for seq, _ in kept],
            num_scheduled_tokens=[count for _, count in kept],
            sampled=[seq for seq in self.sampled if seq.id not in ids],
        )
