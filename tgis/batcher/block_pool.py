"""The KV blocks of a paged engine: which are free, which are in use by how many sequences, and what full ones hold.

A full block may have a hash that names its content and all that comes before it. It then outlives its sequences until
its place is needed: least recently used first. Knows block numbers only, no sequences and no memory.
"""

from collections import OrderedDict
from collections.abc import Iterable
from heapq import heappop, heappush
from itertools import repeat

_NOT_CACHED = -1


class BlockPool:
    """Blocks 0..num_blocks-1; each is free, evictable (unused, but cached), or in use."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_touched = 0  # blocks from here on have never been used
        self._free_blocks: list[int] = []  # a heap: memory is real where the low numbers are
        self._evictable: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._ref_counts: dict[int, int] = {}
        self._hashes: dict[int, bytes] = {}
        self._cached_blocks: dict[bytes, int] = {}

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated, evictable ones included."""
        return self.num_blocks - len(self._ref_counts)

    @property
    def num_used(self) -> int:
        return len(self._ref_counts)

    def count_used(self, blocks: Iterable[int]) -> int:
        """How many of these blocks are in use."""
        return sum(map(self._ref_counts.__contains__, blocks))

    def is_used(self, block_hash: bytes) -> bool:
        """Whether the block with this content is in use."""
        return self._cached_blocks.get(block_hash) in self._ref_counts

    def find_cached(self, hashes: Iterable[bytes]) -> list[int]:
        """The blocks with these hashes, up to the first that is not cached."""
        blocks = [*map(self._cached_blocks.get, hashes, repeat(_NOT_CACHED))]
        return blocks[: blocks.index(_NOT_CACHED)] if _NOT_CACHED in blocks else blocks

    def last_cached(self, hashes: list[bytes]) -> int:
        """The number of hashes up to the last one whose block is cached."""
        return next((count for count in range(len(hashes), 0, -1) if hashes[count - 1] in self._cached_blocks), 0)

    def allocate(self, count: int) -> list[int]:
        """Take blocks to write to; `count` of them must be available."""
        assert count <= self.num_available
        allocated = [self._allocate_one() for _ in range(count)]
        self._ref_counts.update(dict.fromkeys(allocated, 1))
        return allocated

    def incref(self, blocks: Iterable[int]) -> None:
        """Use blocks that were found in the cache."""
        for block in blocks:
            self._evictable.pop(block, None)
            self._ref_counts[block] = self._ref_counts.get(block, 0) + 1

    def free(self, blocks: list[int]) -> None:
        """Drop one reference each; of the blocks that become evictable, the last is evicted first."""
        for block in reversed(blocks):
            self._ref_counts[block] -= 1
            if not self._ref_counts[block]:
                del self._ref_counts[block]
                if block in self._hashes:
                    self._evictable[block] = None
                else:
                    heappush(self._free_blocks, block)

    def set_hash(self, block: int, block_hash: bytes) -> None:
        """Cache a full block that is in use; of two with the same content the first is kept."""
        assert block in self._ref_counts
        if block not in self._hashes and block_hash not in self._cached_blocks:
            self._hashes[block] = block_hash
            self._cached_blocks[block_hash] = block

    def forget(self, block_hash: bytes) -> None:
        """Uncache the block with this content, if there is one."""
        if (block := self._cached_blocks.pop(block_hash, None)) is not None:
            del self._hashes[block]
            if block not in self._ref_counts:
                del self._evictable[block]
                heappush(self._free_blocks, block)

    def forget_all(self) -> None:
        """Forget what the blocks hold: evictable ones become free."""
        for block in self._evictable:
            heappush(self._free_blocks, block)
        self._evictable.clear()
        self._hashes.clear()
        self._cached_blocks.clear()

    def _allocate_one(self) -> int:
        if self._free_blocks:
            return heappop(self._free_blocks)
        if self.num_touched < self.num_blocks:
            self.num_touched += 1
            return self.num_touched - 1
        block, _ = self._evictable.popitem(last=False)
        del self._cached_blocks[self._hashes.pop(block)]
        return block
