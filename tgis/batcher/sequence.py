"""The state of one request for its whole life in the engine process, and the plan of one step over several of them.

There is no prefill phase and no decode phase: a sequence has tokens, of which `num_computed_tokens` are in the
engine's KV cache, and a plan says how many more it computes.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any, Self

from tgis.ipc.request import Request, StopReason
from tgis.speculation.lookup import Lookup


@dataclass(slots=True, eq=False)
class Sequence:
    """State of one request: its tokens, how many are computed, and how it ended."""

    request: Request
    arrival_time: float
    queued_at_step: int = 0  # steps that had succeeded when it was queued last
    tokens: list[int] = field(init=False)  # prompt, then generated
    prompt_length: int = field(init=False)
    max_length: int = field(init=False)  # tokens, prompt included
    num_computed_tokens: int = 0
    num_counted_tokens: int = 0  # prompt tokens counted by StepStats.prompt_tokens, soft prompt included
    was_scheduled: bool = False  # was in the batch of a successful step
    solo_failures: int = 0  # consecutive steps that failed with this sequence alone
    start_tag: int = 0  # virtual time of the waiting queue
    retry_group: int = 0  # after a failed step only sequences of the same group share a step; 0: none
    stop_reason: StopReason = StopReason.NOT_FINISHED
    block_table: list[int] = field(default_factory=list)  # KV blocks in the order of the tokens
    block_hashes: list[bytes] = field(default_factory=list)  # hashes of full blocks, as far as they have been needed
    num_cached_blocks: int = 0  # full blocks that are in the prefix cache
    state_slot: int = -1  # a running sequence has the states of its recurrent layers there
    state_source: int = -1  # the slot that its next step continues from; -1: none, or its own slot
    state_saves: dict[int, int] = field(default_factory=dict)  # token of the next step -> slot for the states after it
    state_boundaries: set[int] = field(default_factory=set)  # numbers of blocks after which to take a snapshot
    rolling_snapshot: bytes = b""  # hash of its newest snapshot, which the next one replaces
    adapter: Any = None  # soft prompt or LoRA adapter as the engine takes it; opaque to the batcher
    grammar: Any = None  # constrains the output; the batcher uses `ready`, `in_thread` and `num_allowed` only
    lookup: Lookup | None = None  # proposes tokens while the sequence runs

    def __post_init__(self) -> None:
        self.tokens = list(self.request.tokens)
        self.prompt_length = len(self.tokens)
        self.max_length = self.prompt_length + self.request.max_new_tokens

    @property
    def id(self) -> int:
        return self.request.id

    @property
    def turn(self) -> tuple[int, float, int]:
        """Sort key of a place in the queue. Of the requests of one client, or of unknown ones, the oldest is first."""
        return self.start_tag, self.arrival_time, self.id

    @property
    def num_generated_tokens(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def num_remaining_tokens(self) -> int:
        """Tokens that may still be generated."""
        return self.max_length - len(self.tokens)

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.tokens) - self.num_computed_tokens

    @property
    def decoding(self) -> bool:
        """Whether all tokens but the newest are computed."""
        return 0 < self.num_computed_tokens == len(self.tokens) - 1

    @property
    def ready(self) -> bool:
        """Whether the tokens that its grammar allows next are known, or need not be waited for."""
        return self.grammar is None or self.grammar.ready

    @property
    def speculative(self) -> bool:
        """Whether tokens may be proposed for its next step."""
        quick = self.grammar is None or not self.grammar.in_thread
        return quick and self.num_generated_tokens > 0 and self.num_remaining_tokens > 1

    def num_allowed(self, tokens: list[int]) -> int:
        """How many of these tokens, from the first on, the grammar allows next."""
        if self.grammar is None:
            return len(tokens)
        return int(self.grammar.num_allowed(self.tokens[self.prompt_length :], tokens))

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether prompt logprobs are to be computed: they have been reported once there is a generated token."""
        return self.request.logprob_options.input_tokens and not self.num_generated_tokens

    @property
    def finished(self) -> bool:
        return self.stop_reason is not StopReason.NOT_FINISHED

    def expired(self, now: float, next_answer: float) -> bool:
        """Whether its deadline has passed, or an answer after `next_answer` may come too late for the client."""
        deadline, answer_deadline = self.request.deadline, self.request.answer_deadline
        return (deadline is not None and now > deadline) or (
            answer_deadline is not None and next_answer > answer_deadline
        )


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: which sequences run, how many tokens each computes, and which get a new token."""

    seqs: list[Sequence]
    num_scheduled_tokens: list[int]
    sampled: list[Sequence]  # those whose tokens are all computed after the step
    has_prefill: bool  # some sequence does more than decode
    to_release: tuple[Sequence, ...] = ()  # left the batch since the last plan; this one may schedule them again
    # By request id: tokens to verify after the newest one, and the number of tokens to draft and verify.
    proposals: Mapping[int, list[int]] = field(default_factory=dict)
    drafts: Mapping[int, int] = field(default_factory=dict)

    @property
    def num_prefill_tokens(self) -> list[int]:
        """The number of tokens of each sequence that does more than decode; valid until the step is committed."""
        if not self.has_prefill:
            return []
        return [count for seq, count in zip(self.seqs, self.num_scheduled_tokens, strict=True) if not seq.decoding]

    @classmethod
    def of(cls, seqs: list[Sequence], counts: list[int], to_release: Iterable[Sequence] = ()) -> Self:
        """A step in which each sequence computes its count of tokens."""
        sampled = [seq for seq, count in zip(seqs, counts, strict=True) if count == seq.num_uncomputed_tokens]
        has_prefill = not all(seq.decoding for seq in seqs)
        return cls(seqs, counts, sampled, has_prefill, tuple(to_release))

    @classmethod
    def compute_all(cls, seqs: list[Sequence]) -> Self:
        """A step in which each sequence computes all its uncomputed tokens."""
        return cls.of(seqs, [seq.num_uncomputed_tokens for seq in seqs])

    def without(self, ids: Collection[int]) -> Self:
        """The step with the sequences of these requests left out."""
        work = zip(self.seqs, self.num_scheduled_tokens, strict=True)
        kept = [(seq, count) for seq, count in work if seq.id not in ids]
        return replace(
            self,
            seqs=[seq for seq, _ in kept],
            num_scheduled_tokens=[count for _, count in kept],
            sampled=[seq for seq in self.sampled if seq.id not in ids],
        )


def num_common(one: list[int], other: list[int]) -> int:
    """How many tokens two lists begin with that are the same."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
