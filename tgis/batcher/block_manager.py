"""Which row has which KV blocks: prefixes that are cached already, room for the tokens of a step, preemption.

Rows are admitted on what their prompts need, not on what they may grow to. When blocks run out, the youngest rows
give theirs back and wait to be computed anew; the oldest always gets on. The pool owns the blocks' states.
"""

import hashlib
from array import array
from collections.abc import Iterable
from typing import Self

from tgis.batcher.block_pool import BlockPool
from tgis.batcher.memory_model import Limits
from tgis.batcher.sequence import Sequence
from tgis.ipc.messages import Admissions

_KEY_BYTES = 16


class Pager:
    """Blocks of `size` tokens for rows, in their order: the n-th holds tokens n * size up to (n + 1) * size."""

    def __init__(self, blocks: int, size: int, *, prefix_cache: bool, ahead: int = 0) -> None:
        self.pool = BlockPool(blocks)
        self.size = size
        self.keys_made = 0  # ever: it takes time
        self._prefix_cache = prefix_cache
        self._ahead = ahead

    @classmethod
    def of(cls, limits: Limits) -> Self:
        """As many blocks as the memory holds."""
        blocks = limits.memory.context_limit(padded=False) // limits.block_size
        return cls(blocks, limits.block_size, prefix_cache=limits.prefix_cache, ahead=limits.ahead)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // self.size)

    def missing(self, row: Sequence, tokens: int) -> int:
        """Blocks that a row still needs to hold so many tokens."""
        return max(0, -(-tokens // self.size) - len(row.blocks))

    def cached(self, row: Sequence) -> list[int]:
        """Blocks that hold the beginning of a row that waits; never all of it: one token at least is to compute."""
        found: list[int] = []
        most, looked = self._sharable(row), len(row.keys)
        while len(found) < most:
            looked = min(max(looked, 2 * len(found) + 1), most)  # no more keys are made than are of use
            found = self.pool.find(self._keys(row, looked))
            if len(found) < looked:
                break
        return found

    def follows(self, row: Sequence, other: Sequence) -> bool:
        """Whether the next block that `other` will fill is the first one that is missing to a row that waits."""
        place = other.labelled
        if place >= min(self._sharable(row), len(other.tokens) // self.size):
            return False
        same_start = self._key(row, 0) == self._key(other, 0)
        return same_start and self._key(row, place) == self._key(other, place)

    def exceeds(self, row: Sequence, room: int) -> bool:
        """Whether two looks tell that a row which waits needs `room` blocks at least: others use too little of it."""
        last = self.blocks_for(len(row.tokens) + 1) - room  # of the blocks that others would have to use
        if last < 0:
            return False
        if last >= self._sharable(row):
            return True
        return not (self.pool.shares(self._key(row, 0)) and self.pool.shares(self._key(row, last)))

    def needed(self, row: Sequence) -> int:
        """Blocks that nobody uses now and that a row which waits needs for all it has, and for one token more."""
        return self.blocks_for(len(row.tokens) + 1) - self.pool.in_use(self.cached(row))

    def join(self, row: Sequence, counts: Admissions) -> None:
        """Let a row begin behind what is cached of it."""
        row.blocks = self.cached(row)
        self.pool.share(row.blocks)
        row.labelled = len(row.blocks)
        row.computed = row.labelled * self.size
        if self._reads_cache(row):
            counts.prefix_queries += len(row.tokens)
            counts.prefix_hits += row.computed

    def reserve(self, row: Sequence, count: int) -> bool:
        """Give a row the blocks for `count` more tokens, all or nothing."""
        if row.computed + count <= len(row.blocks) * self.size:
            return True
        missing = self.missing(row, row.computed + count)
        if missing > self.pool.available:
            return False
        row.blocks += self.pool.take(missing)
        return True

    def look_ahead(self, work: Iterable[tuple[Sequence, int]]) -> None:
        """Give rows that get a token in this step, now that all have what they need for it, blocks for those after it,
        as far as there are any: an engine that runs ahead needs them one step before a row does.
        """
        for row, count in work if self._ahead else ():
            if count == row.pending:
                self.reserve(row, count + min(self._ahead, row.remaining - 1))

    def label(self, row: Sequence) -> None:
        """Let others find the blocks that the row has filled."""
        if self._prefix_cache:
            while row.labelled < row.computed // self.size:
                self.pool.label(row.blocks[row.labelled], self._key(row, row.labelled))
                row.labelled += 1

    def free(self, rows: Iterable[Sequence]) -> None:
        """Take a row's blocks; it has nothing computed any more."""
        for row in rows:
            self.pool.give_back(row.blocks)
            row.blocks = []
            row.computed = row.labelled = 0

    def _reads_cache(self, row: Sequence) -> bool:
        """Facts about input tokens come from computing them."""
        return self._prefix_cache and not (row.request.details.inputs and not row.generated)

    def _sharable(self, row: Sequence) -> int:
        """Blocks of a row that need not be computed if they are cached."""
        return (len(row.tokens) - 1) // self.size if self._reads_cache(row) else 0

    def _key(self, row: Sequence, place: int) -> bytes:
        if place >= len(row.keys):
            self._make_keys(row, place + 1)
        return row.keys[place]

    def _keys(self, row: Sequence, count: int) -> list[bytes]:
        if count > len(row.keys):
            self._make_keys(row, count)
        return row.keys[:count]

    def _make_keys(self, row: Sequence, count: int) -> None:
        """Name full blocks, each after the one before it: equal keys mean equal tokens so far."""
        tokens = array("i", row.tokens[len(row.keys) * self.size : count * self.size])
        width, data = self.size * tokens.itemsize, tokens.tobytes()
        self.keys_made += count - len(row.keys)
        for begin in range(0, len(data), width):
            parent = row.keys[-1] if row.keys else _digest(row.request.cache_salt)
            row.keys.append(_digest(parent + data[begin : begin + width]))


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_KEY_BYTES).digest()
