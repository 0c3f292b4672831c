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
    def of_tokens(cls, limit: int) -> Self:
        """Room for so many tokens of context; a prefill needs nothing besides."""
        return cls(weight_limit=limit)

    def gradient(self, padded: bool) -> float:
        """Weight of one token of context."""
        return max(self.next_token_input, self.next_token_output) if padded else self.next_token_output

    def context_limit(self, padded: bool) -> int:
        """Tokens of context that there is room for."""
        gradient = self.gradient(padded)
        return int(self.weight_limit / gradient) if gradient else UNBOUNDED

    def prefill(self, count: int, longest: int, total: int, padded: bool) -> int:
        """Weight of a prefill of `count` rows with `total` tokens, the longest of `longest`."""
        if not padded:
            return int(self.prefill_linear * total)
        area = count * longest
        quadratic = (self.prefill_quadratic_0 + self.prefill_quadratic_1 * longest) * area
        return int(max(self.prefill_linear * area, quadratic))


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a batch, and what sort of engine runs it."""

    max_batch_size: int
    memory: MemoryModel
    prefill_tokens: int  # tokens of one prefill, padding included, or of one step of an engine that chunks
    max_padding: float = 1.0  # share of padding in a prefill; 1 is off
    padded: bool = False  # rectangular batches: rows x longest, not the sum of lengths
    block_size: int = 0  # tokens of a KV block; 0 is an engine without, that computes whole prompts
    prefix_cache: bool = False  # full blocks are found again by rows that begin with the same tokens
    ahead: int = 0  # tokens of a row beyond a step for which it gets a block, if one is free
    stretch: float = 2.0  # how much longer a step may take for prompts beside rows that decode
    max_waiting_tokens: int = 24  # steps that waiting requests may be kept back for the sake of running ones

    def __post_init__(self) -> None:
        assert not (self.padded and self.block_size), "a padded engine has no blocks"


def check_longest(limits: Limits, length: int) -> None:
    """StartError unless one request of this many tokens fits into memory."""
    memory, padded = limits.memory, limits.padded
    needed = max(memory.prefill(1, length, length, padded), int(memory.gradient(padded) * length))
    if needed > memory.weight_limit:
        most = longest_request(limits, length)
        raise StartError(
            f"MAX_SEQUENCE_LENGTH {length} does not fit into memory, {most} does: lower it, "
            "or BATCH_SAFETY_MARGIN, or choose a smaller dtype"
        )


def longest_request(limits: Limits, at_most: int) -> int:
    """Tokens of the longest single request, input and output, that fits into memory."""
    memory, padded = limits.memory, limits.padded
    low, high = 0, min(at_most, memory.context_limit(padded))
    while low < high:
        middle = (low + high + 1) // 2
        if memory.prefill(1, middle, middle, padded) <= memory.weight_limit:
            low = middle
        else:
            high = middle - 1
    return low


def area(lengths: Collection[int], padded: bool) -> int:
    """Tokens of a batch of rows with these lengths, padding included."""
    return len(lengths) * max(lengths, default=0) if padded else sum(lengths)


class Prefill:
    """The shape of a prefill, or of any batch, while it is put together."""

    def __init__(self, padded: bool) -> None:
        self._padded = padded
        self.count = 0
        self.longest = 0
        self.total = 0

    def add(self, tokens: int) -> None:
        """One more row, with so many tokens to compute."""
        self.count += 1
        self.longest = max(self.longest, tokens)
        self.total += tokens

    def with_row(self, tokens: int) -> "Prefill":
        """What it would be with one more row."""
        other = Prefill(self._padded)
        other.count, other.longest, other.total = self.count, self.longest, self.total
        other.add(tokens)
        return other

    def tokens_beside(self, other: "Prefill") -> int:
        """Tokens of both together, padding included."""
        if self._padded:
            return (self.count + other.count) * max(self.longest, other.longest)
        return self.total + other.total

    @property
    def tokens(self) -> int:
        """Tokens to compute, padding included."""
        return self.count * self.longest if self._padded else self.total

    @property
    def padding(self) -> float:
        """Share of the tokens that is padding."""
        return (self.tokens - self.total) / self.tokens if self.tokens else 0.0
