"""The KV blocks of a paged engine: which are free, which are in use by how many rows, and what full ones hold.

A full block may carry a key that names its content and all that came before it. It outlives its rows then, until
its place is needed: least recently used ones go first. Knows block numbers only, no rows and no memory.
"""

from collections import OrderedDict
from collections.abc import Iterable
from itertools import repeat

_NOWHERE = -1


class BlockPool:
    """Blocks 0..count-1; each is free, or idle (nobody uses it, but its content has a key), or in use."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._fresh = 0  # blocks from here on have never been used
        self._free: list[int] = []
        self._idle: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._users: dict[int, int] = {}
        self._keys: dict[int, bytes] = {}
        self._blocks: dict[bytes, int] = {}

    @property
    def available(self) -> int:
        """Blocks that can be taken."""
        return self.count - len(self._users)

    @property
    def used(self) -> int:
        """Blocks that some row uses."""
        return len(self._users)

    def in_use(self, blocks: Iterable[int]) -> int:
        """How many of these blocks some row uses."""
        return sum(map(self._users.__contains__, blocks))

    def shares(self, key: bytes) -> bool:
        """Whether some row uses the block with this content."""
        return self._blocks.get(key) in self._users

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The blocks with these contents, up to the first that is not here."""
        found = [*map(self._blocks.get, keys, repeat(_NOWHERE))]
        return found[: found.index(_NOWHERE)] if _NOWHERE in found else found

    def take(self, count: int) -> list[int]:
        """Blocks to write to; there must be so many."""
        assert count <= self.available
        taken = [self._take_one() for _ in range(count)]
        self._users.update(dict.fromkeys(taken, 1))
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """One more user of blocks that were found."""
        for block in blocks:
            self._idle.pop(block, None)
            self._users[block] = self._users.get(block, 0) + 1

    def give_back(self, blocks: list[int]) -> None:
        """One user less; of what becomes idle, the last block is the first to be evicted."""
        for block in reversed(blocks):
            self._users[block] -= 1
            if not self._users[block]:
                del self._users[block]
                if block in self._keys:
                    self._idle[block] = None
                else:
                    self._free.append(block)

    def label(self, block: int, key: bytes) -> None:
        """Say what a full block in use holds; of two with the same content the first one keeps the key."""
        assert block in self._users
        if block not in self._keys and key not in self._blocks:
            self._keys[block] = key
            self._blocks[key] = block

    def check(self) -> None:
        """Every block is in one state only, and keys lead back to their blocks."""
        free, idle, used = set(self._free), set(self._idle), set(self._users)
        assert len(free) == len(self._free)
        assert len(free) + len(idle) + len(used) == self._fresh <= self.count
        assert free | idle | used == set(range(self._fresh))
        assert min(self._users.values(), default=1) > 0
        assert idle <= set(self._keys) <= idle | used
        assert {key: block for block, key in self._keys.items()} == self._blocks

    def _take_one(self) -> int:
        if self._free:
            return self._free.pop()
        if self._fresh < self.count:
            self._fresh += 1
            return self._fresh - 1
        block, _ = self._idle.popitem(last=False)
        del self._blocks[self._keys.pop(block)]
        return block
