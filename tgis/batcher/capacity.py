"""The cost of a batch in memory and padding, now and at its peak, and the limits of memory.

Everything is computed from lengths. The unit is the memory of one token of context. Batches of a padded engine are
rectangles; those of other engines cost the sum of their lengths.
"""

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import accumulate

from tgis.errors import StartError

_SHRINK_FACTOR = 0.9  # share of the context that did not fit
_RECOVERY_STEPS = 256  # successful steps before a limit grows again
_RECOVERY_DIVISOR = 64  # it grows by 1/64


def padded_tokens(lengths: Collection[int], padded: bool) -> int:
    """Tokens of a batch of sequences with these lengths, padding included."""
    return len(lengths) * max(lengths, default=0) if padded else sum(lengths)


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """The limits of a batch, and the kind of engine that runs it."""

    max_batch_size: int
    token_capacity: int  # tokens of context that fit into memory beside the largest step, padding included
    prefill_tokens: int  # tokens of one prefill with padding; of one step if prefill is chunked
    max_prefill_padding: float = 1.0  # share of a prefill; 1 is off
    padded: bool = False
    block_size: int = 0  # tokens of a KV block; 0: no blocks, no chunked prefill
    prefix_cache: bool = False  # reuse full blocks for sequences that begin with the same tokens
    lookahead: int = 0  # tokens beyond the step for which a sequence gets a block, if one is free
    max_prefill_gap_ms: int = 250  # longest step with prefill chunks and decodes
    max_waiting_tokens: int = 24  # most decode steps before waiting requests may prefill
    encoder_decoder: bool = False  # paged: an input has separate blocks, and is computed in one step
    proposed_tokens: int = 0  # most proposed tokens that the engine verifies for a sequence in one step
    drafted_tokens: int = 0  # most tokens that the draft model makes for a sequence; 0: no draft model
    max_drafting: int = 1 << 40  # most sequences of a step with drafts
    state_slots: int = 0  # states of recurrent layers: of sequences, snapshots, proposals; 0: no such layers
    vocab_size: int = 1 << 40  # the model samples ids below it, while prompts may have others

    def __post_init__(self) -> None:
        assert not (self.padded and self.block_size), "a padded engine has no blocks"
        assert self.block_size or not self.encoder_decoder, "other engines count no blocks"
        assert self.block_size or not self.proposed_tokens, "other engines verify no proposals"
        assert self.block_size or not self.state_slots, "other engines save no states"
        assert not self.state_slots or self.state_slots >= self.max_batch_size, "a running sequence has a slot"
        assert not (self.state_slots and self.lookahead), "a step in flight would change states twice"
        assert not (self.lookahead and self.proposed_tokens), "a step in flight expects one token of each"


def encoder_decoder_room(token_capacity: int, block_size: int) -> int:
    """Tokens of the largest request that blocks of so many tokens hold, whatever part of them is input: input and
    output share no block, and the last token of an output is not computed.
    """
    return max((token_capacity // block_size - 1) * block_size + 1, 0)


def check_max_sequence_length(max_request_tokens: int, length: int) -> None:
    """Raise StartError unless one request of this many tokens fits into memory."""
    if max_request_tokens < length:
        raise StartError(
            f"MAX_SEQUENCE_LENGTH {length} does not fit into memory, {max_request_tokens} does: lower it "
            "or BATCH_SAFETY_MARGIN, raise KV_CACHE_SIZE_MB if it is set, or choose a smaller dtype"
        )


class CapacityLimits:
    """The present limits in tokens. They shrink when a step runs out of memory, then slowly grow again.

    A failure in thousands of steps costs little; a limit that never recovered would cost throughput for good.
    """

    def __init__(self, limits: BatchLimits) -> None:
        self._limits = limits
        self.context_tokens = limits.token_capacity
        self.prefill_tokens = limits.prefill_tokens
        self._steps_since_shrink = 0

    def shrink_prefill(self, tokens: int) -> None:
        """A prefill of several sequences with this many tokens ran out of memory."""
        self.prefill_tokens = max(1, min(self.prefill_tokens, tokens // 2))
        self._steps_since_shrink = 0

    def shrink_context(self, tokens: int) -> None:
        """A step ran out of memory while the batch held this many tokens of context."""
        self.context_tokens = max(1, min(self.context_tokens, int(tokens * _SHRINK_FACTOR)))
        self._steps_since_shrink = 0

    def step_succeeded(self) -> None:
        self._steps_since_shrink += 1
        if self._steps_since_shrink % _RECOVERY_STEPS == 0:
            self.context_tokens = _grow(self.context_tokens, self._limits.token_capacity)
            self.prefill_tokens = _grow(self.prefill_tokens, self._limits.prefill_tokens)


def _grow(value: int, maximum: int) -> int:
    return min(maximum, value + value // _RECOVERY_DIVISOR + 1)


class PeakEstimator:
    """The largest context that a batch will ever have: sequences that end early leave room for others to grow.

    All sequences grow by one token per step, so the context grows until one ends: its peaks are the steps in which
    sequences end.
    """

    def __init__(self, seqs: Iterable[tuple[int, int]], padded: bool, limit: int) -> None:
        """`seqs` are pairs: the length, and how many tokens are still to be generated."""
        self._padded = padded
        self._limit = limit
        self._seqs = sorted((-remaining, length) for length, remaining in seqs)  # the longest-lived first
        self._rejected: list[tuple[int, int]] = []

    def fits_worst_case(self, length: int, remaining: int) -> bool:
        """Whether one more sequence fits even if all last as long as the last one."""
        seqs = [(-remaining, length), *self._seqs]
        if self._padded:
            return len(seqs) * (max(length for _, length in seqs) - min(seqs)[0]) <= self._limit
        return sum(length - end for end, length in seqs) <= self._limit

    def fits(self, length: int, remaining: int) -> bool:
        """Whether the batch with one more sequence stays within the limit for good."""
        if any(length >= other and remaining >= rest for other, rest in self._rejected):
            return False
        if self.fits_worst_case(length, remaining):
            return True
        at = bisect_left(self._seqs, (-remaining, 0))
        seqs = [*self._seqs[:at], (-remaining, length), *self._seqs[at:]]
        if max(self._context_at_ends(seqs)[at:]) <= self._limit:  # longer-lived ones see no difference
            return True
        self._rejected.append((length, remaining))
        return False

    def add(self, length: int, remaining: int) -> None:
        insort(self._seqs, (-remaining, length))

    def _context_at_ends(self, seqs: list[tuple[int, int]]) -> list[int]:
        """Tokens of context when each sequence ends; of those that end together, the last one counts them all."""
        lengths = accumulate((length for _, length in seqs), max if self._padded else None)
        numbered = enumerate(zip(seqs, lengths, strict=True), 1)
        return [length * (n if self._padded else 1) - end * n for n, ((end, _), length) in numbered]
