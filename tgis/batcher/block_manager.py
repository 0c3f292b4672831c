"""Which row has which KV blocks: prefixes that are cached already, room for the tokens of a step, preemption.

Rows are admitted on what their prompts need, not on what they may grow to. When blocks run out, the youngest rows
give theirs back and wait to be computed anew; the oldest always gets on. The pool owns the blocks' states.
"""

import hashlib
from array import array
from collections.abc import Iterable
from typing import Self

from tgis.batcher.block_pool import BlockPool
from tgis.batcher.memory_model import BatchLimits
from tgis.batcher.sequence import Sequence
from tgis.ipc.messages import AdmissionCounters

_HASH_BYTES = 16


class BlockManager:
    """Blocks of `size` tokens for rows, in their order: the n-th holds tokens n * size up to (n + 1) * size."""

    def __init__(self, num_blocks: int, block_size: int, *, prefix_cache: bool, lookahead: int = 0) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.num_hashed_blocks = 0  # ever: it takes time
        self._prefix_cache = prefix_cache
        self._lookahead = lookahead

    @classmethod
    def from_limits(cls, limits: BatchLimits) -> Self:
        """As many blocks as the memory holds."""
        blocks = limits.memory.context_limit(padded=False) // limits.block_size
        return cls(blocks, limits.block_size, prefix_cache=limits.prefix_cache, lookahead=limits.lookahead)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // self.block_size)

    def missing_blocks(self, row: Sequence, tokens: int) -> int:
        """Blocks that a row still needs to hold so many tokens."""
        return max(0, -(-tokens // self.block_size) - len(row.block_table))

    def cached_prefix(self, row: Sequence) -> list[int]:
        """Blocks that hold the beginning of a row that waits; never all of it: one token at least is to compute."""
        found: list[int] = []
        most, looked = self._max_cached_blocks(row), len(row.block_hashes)
        while len(found) < most:
            looked = min(max(looked, 2 * len(found) + 1), most)  # no more keys are made than are of use
            found = self.pool.find_cached(self._block_hashes(row, looked))
            if len(found) < looked:
                break
        return found

    def shares_inflight_prefix(self, row: Sequence, other: Sequence) -> bool:
        """Whether the next block that `other` will fill is the first one that is missing to a row that waits."""
        place = other.num_cached_blocks
        if place >= min(self._max_cached_blocks(row), len(other.tokens) // self.block_size):
            return False
        same_start = self._block_hash(row, 0) == self._block_hash(other, 0)
        return same_start and self._block_hash(row, place) == self._block_hash(other, place)

    def needs_at_least(self, row: Sequence, num_blocks: int) -> bool:
        """Whether two looks tell that a row which waits needs `room` blocks at least: others use too little of it."""
        last = self.blocks_for(len(row.tokens) + 1) - num_blocks  # of the blocks that others would have to use
        if last < 0:
            return False
        if last >= self._max_cached_blocks(row):
            return True
        return not (self.pool.is_used(self._block_hash(row, 0)) and self.pool.is_used(self._block_hash(row, last)))

    def new_blocks_needed(self, row: Sequence) -> int:
        """Blocks that nobody uses now and that a row which waits needs for all it has, and for one token more."""
        return self.blocks_for(len(row.tokens) + 1) - self.pool.count_used(self.cached_prefix(row))

    def attach_cached_prefix(self, row: Sequence, counters: AdmissionCounters) -> None:
        """Let a row begin behind what is cached of it."""
        row.block_table = self.cached_prefix(row)
        self.pool.incref(row.block_table)
        row.num_cached_blocks = len(row.block_table)
        row.num_computed_tokens = row.num_cached_blocks * self.block_size
        if self._uses_prefix_cache(row):
            counters.prefix_cache_queries += len(row.tokens)
            counters.prefix_cache_hits += row.num_computed_tokens

    def allocate(self, row: Sequence, num_tokens: int) -> bool:
        """Give a row the blocks for `count` more tokens, all or nothing."""
        if row.num_computed_tokens + num_tokens <= len(row.block_table) * self.block_size:
            return True
        missing = self.missing_blocks(row, row.num_computed_tokens + num_tokens)
        if missing > self.pool.num_available:
            return False
        row.block_table += self.pool.allocate(missing)
        return True

    def allocate_lookahead(self, scheduled: Iterable[tuple[Sequence, int]]) -> None:
        """Give rows that get a token in this step, now that all have what they need for it, blocks for those after it,
        as far as there are any: an engine that runs ahead needs them one step before a row does.
        """
        for row, count in scheduled if self._lookahead else ():
            if count == row.num_uncomputed_tokens:
                self.allocate(row, count + min(self._lookahead, row.num_remaining_tokens - 1))

    def cache_full_blocks(self, row: Sequence) -> None:
        """Let others find the blocks that the row has filled."""
        if self._prefix_cache:
            while row.num_cached_blocks < row.num_computed_tokens // self.block_size:
                self.pool.set_hash(row.block_table[row.num_cached_blocks], self._block_hash(row, row.num_cached_blocks))
                row.num_cached_blocks += 1

    def free(self, rows: Iterable[Sequence]) -> None:
        """Take a row's blocks; it has nothing computed any more."""
        for row in rows:
            self.pool.free(row.block_table)
            row.block_table = []
            row.num_computed_tokens = row.num_cached_blocks = 0

    def _uses_prefix_cache(self, row: Sequence) -> bool:
        """Facts about input tokens come from computing them."""
        return self._prefix_cache and not (row.request.logprob_options.input_tokens and not row.num_generated_tokens)

    def _max_cached_blocks(self, row: Sequence) -> int:
        """Blocks of a row that need not be computed if they are cached."""
        return (len(row.tokens) - 1) // self.block_size if self._uses_prefix_cache(row) else 0

    def _block_hash(self, row: Sequence, index: int) -> bytes:
        if index >= len(row.block_hashes):
            self._hash_blocks(row, index + 1)
        return row.block_hashes[index]

    def _block_hashes(self, row: Sequence, count: int) -> list[bytes]:
        if count > len(row.block_hashes):
            self._hash_blocks(row, count)
        return row.block_hashes[:count]

    def _hash_blocks(self, row: Sequence, count: int) -> None:
        """Name full blocks, each after the one before it: equal keys mean equal tokens so far."""
        tokens = array("i", row.tokens[len(row.block_hashes) * self.block_size : count * self.block_size])
        width, data = self.block_size * tokens.itemsize, tokens.tobytes()
        self.num_hashed_blocks += count - len(row.block_hashes)
        for begin in range(0, len(data), width):
            parent = row.block_hashes[-1] if row.block_hashes else _hash(row.request.cache_salt)
            row.block_hashes.append(_hash(parent + data[begin : begin + width]))


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_HASH_BYTES).digest()
