"""What a batch costs in memory and in padding. Knows lengths only, never tokens.

A weight is in the unit of the memory model's coefficients: bytes, or percent, or tokens of context. Batches of a
padded engine are rectangles; those of others weigh the sum of their rows.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Self

from tgis.errors import StartError

UNBOUNDED = 1 << 62


@dataclass(frozen=True, slots=True)
class MemoryModel:
    """Weight of a pass, and how much there is room for; the coefficients are those of TGIS's ModelInfo."""

    weight_limit: int
    prefill_linear: float = 0.0  # per token
    prefill_quadratic_0: float = 0.0  # per token, where the pass is quadratic
    prefill_quadratic_1: float = 0.0  # per token and token of its row
    next_token_input: float = 1.0  # per token of input
    next_token_output: float = 1.0  # per generated token

    @classmethod
    def from_tokens(cls, limit: int) -> Self:
        """Room for so many tokens of context; a prefill needs nothing besides."""
        return cls(weight_limit=limit)

    def cost_per_token(self, padded: bool) -> float:
        """Weight of one token of context."""
        return max(self.next_token_input, self.next_token_output) if padded else self.next_token_output

    def context_limit(self, padded: bool) -> int:
        """Tokens of context that there is room for."""
        gradient = self.cost_per_token(padded)
        return int(self.weight_limit / gradient) if gradient else UNBOUNDED

    def prefill_cost(self, num_seqs: int, max_length: int, total_tokens: int, padded: bool) -> int:
        """Weight of a prefill of `count` rows with `total` tokens, the longest of `longest`."""
        if not padded:
            return int(self.prefill_linear * total_tokens)
        tokens = num_seqs * max_length
        quadratic = (self.prefill_quadratic_0 + self.prefill_quadratic_1 * max_length) * tokens
        return int(max(self.prefill_linear * tokens, quadratic))


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """What bounds a batch, and what sort of engine runs it."""

    max_batch_size: int
    memory: MemoryModel
    prefill_tokens: int  # tokens of one prefill, padding included, or of one step of an engine that chunks
    max_prefill_padding: float = 1.0  # share of padding in a prefill; 1 is off
    padded: bool = False  # rectangular batches: rows x longest, not the sum of lengths
    block_size: int = 0  # tokens of a KV block; 0 is an engine without, that computes whole prompts
    prefix_cache: bool = False  # full blocks are found again by rows that begin with the same tokens
    lookahead: int = 0  # tokens of a row beyond a step for which it gets a block, if one is free
    max_slowdown: float = 2.0  # how much longer a step may take for prompts beside rows that decode
    max_waiting_tokens: int = 24  # steps that waiting requests may be kept back for the sake of running ones

    def __post_init__(self) -> None:
        assert not (self.padded and self.block_size), "a padded engine has no blocks"


def check_max_sequence_length(limits: BatchLimits, length: int) -> None:
    """StartError unless one request of this many tokens fits into memory."""
    memory, padded = limits.memory, limits.padded
    needed = max(memory.prefill_cost(1, length, length, padded), int(memory.cost_per_token(padded) * length))
    if needed > memory.weight_limit:
        most = max_request_tokens(limits, length)
        raise StartError(
            f"MAX_SEQUENCE_LENGTH {length} does not fit into memory, {most} does: lower it, "
            "or BATCH_SAFETY_MARGIN, or choose a smaller dtype"
        )


def max_request_tokens(limits: BatchLimits, upper_bound: int) -> int:
    """Tokens of the longest single request, input and output, that fits into memory."""
    memory, padded = limits.memory, limits.padded
    low, high = 0, min(upper_bound, memory.context_limit(padded))
    while low < high:
        middle = (low + high + 1) // 2
        if memory.prefill_cost(1, middle, middle, padded) <= memory.weight_limit:
            low = middle
        else:
            high = middle - 1
    return low


def padded_tokens(lengths: Collection[int], padded: bool) -> int:
    """Tokens of a batch of rows with these lengths, padding included."""
    return len(lengths) * max(lengths, default=0) if padded else sum(lengths)


class BatchShape:
    """The shape of a prefill, or of any batch, while it is put together."""

    def __init__(self, padded: bool) -> None:
        self._padded = padded
        self.num_seqs = 0
        self.max_length = 0
        self.total_tokens = 0

    def add(self, tokens: int) -> None:
        """One more row, with so many tokens to compute."""
        self.num_seqs += 1
        self.max_length = max(self.max_length, tokens)
        self.total_tokens += tokens

    def with_seq(self, tokens: int) -> "BatchShape":
        """What it would be with one more row."""
        other = BatchShape(self._padded)
        other.num_seqs, other.max_length, other.total_tokens = self.num_seqs, self.max_length, self.total_tokens
        other.add(tokens)
        return other

    def combined_tokens(self, other: "BatchShape") -> int:
        """Tokens of both together, padding included."""
        if self._padded:
            return (self.num_seqs + other.num_seqs) * max(self.max_length, other.max_length)
        return self.total_tokens + other.total_tokens

    @property
    def padded_tokens(self) -> int:
        """Tokens to compute, padding included."""
        return self.num_seqs * self.max_length if self._padded else self.total_tokens

    @property
    def padding_ratio(self) -> float:
        """Share of the tokens that is padding."""
        return (self.padded_tokens - self.total_tokens) / self.padded_tokens if self.padded_tokens else 0.0
