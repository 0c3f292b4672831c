"""Which row has which KV blocks: prefixes that are cached already, room for the tokens of a step, preemption.

Rows are admitted on what their prompts need, not on what they may grow to. When blocks run out, the youngest rows
give theirs back and wait to be computed anew; the oldest always gets on. The pool owns the blocks' states.
"""

import hashlib
from array import array
from collections.abc import Iterable
from itertools import takewhile

from tgis.batcher.blocks import BlockPool
from tgis.batcher.sequence import Sequence
from tgis.messages import Admissions

_KEY_BYTES = 16


class Pager:
    """Blocks of `size` tokens for rows, in their order: the n-th holds tokens n * size up to (n + 1) * size."""

    def __init__(self, blocks: int, size: int, *, prefix_cache: bool) -> None:
        self.pool = BlockPool(blocks)
        self.size = size
        self._prefix_cache = prefix_cache

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // self.size)

    def missing(self, row: Sequence, tokens: int) -> int:
        """Blocks that a row still needs to hold so many tokens."""
        return max(0, self.blocks_for(tokens) - len(row.blocks))

    def cached(self, row: Sequence) -> list[int]:
        """Blocks that hold the beginning of a row that waits; never all of it: one token at least is to compute."""
        found = (self.pool.find(key) for key in self._sharable_keys(row))
        return [block for block in takewhile(lambda block: block is not None, found) if block is not None]

    def awaits(self, row: Sequence, promised: set[bytes]) -> bool:
        """Whether the first block that is not cached is being computed for another row just now."""
        keys = self._sharable_keys(row)
        place = len(self.cached(row))
        return place < len(keys) and keys[place] in promised

    def promised(self, rows: Iterable[Sequence]) -> set[bytes]:
        """What blocks will hold that these rows are about to fill with their prompts."""
        return {key for row in rows if not row.decoding for key in self._keys(row)}

    def needed(self, row: Sequence) -> int:
        """Blocks that nobody uses now and that a row which waits needs for all it has, and for one token more."""
        shared = sum(self.pool.users(block) > 0 for block in self.cached(row))
        return self.blocks_for(len(row.tokens) + 1) - shared

    def join(self, row: Sequence, counts: Admissions) -> None:
        """Let a row begin behind what is cached of it."""
        row.blocks = self.cached(row)
        self.pool.share(row.blocks)
        row.computed = len(row.blocks) * self.size
        if self._reads_cache(row):
            counts.prefix_queries += len(row.tokens)
            counts.prefix_hits += row.computed

    def reserve(self, row: Sequence, count: int) -> bool:
        """Give a row the blocks for `count` more tokens, all or nothing."""
        missing = self.missing(row, row.computed + count)
        if missing > self.pool.available:
            return False
        row.blocks += self.pool.take(missing)
        return True

    def label(self, row: Sequence) -> None:
        """Let others find the blocks that the row has filled."""
        if self._prefix_cache:
            for place, key in enumerate(self._keys(row)[: row.computed // self.size]):
                if place >= row.labelled:
                    self.pool.label(row.blocks[place], key)
                    row.labelled = place + 1

    def free(self, rows: Iterable[Sequence]) -> None:
        """Take a row's blocks; it has nothing computed any more."""
        for row in rows:
            self.pool.give_back(row.blocks)
            row.blocks = []
            row.computed = row.labelled = 0

    def _reads_cache(self, row: Sequence) -> bool:
        """Facts about input tokens come from computing them."""
        return self._prefix_cache and not (row.request.details.inputs and not row.generated)

    def _sharable_keys(self, row: Sequence) -> list[bytes]:
        return self._keys(row)[: (len(row.tokens) - 1) // self.size] if self._reads_cache(row) else []

    def _keys(self, row: Sequence) -> list[bytes]:
        """Names of the row's full blocks, each made of the one before it: equal keys mean equal tokens so far."""
        if not self._prefix_cache:
            return []
        for place in range(len(row.keys), len(row.tokens) // self.size):
            parent = row.keys[-1] if row.keys else row.request.cache_salt
            tokens = array("q", row.tokens[place * self.size : (place + 1) * self.size]).tobytes()
            row.keys.append(hashlib.blake2b(tokens, key=parent, digest_size=_KEY_BYTES).digest())
        return row.keys
