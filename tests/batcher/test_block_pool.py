"""The block pool under random operations, against the simplest model of it."""

from batches import check_pool
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tgis.batcher.block_pool import BlockPool

HASHES = [bytes([n]) for n in range(8)]


class Pool(RuleBasedStateMachine):
    """The model: the blocks of each sequence, and the cached blocks in the order in which they were last freed."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(0)
        self.count = 0
        self.seqs: list[list[int]] = []
        self.contents: dict[int, bytes] = {}
        self.evictable: list[int] = []  # least recently used first

    @rule(count=st.integers(0, 12))
    @precondition(lambda self: not self.count)
    def start(self, count: int) -> None:
        self.count = count
        self.pool = BlockPool(count)

    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        """For a new sequence, or one that grows."""
        blank = set(range(self.count)) - self.used() - set(self.evictable)
        count = data.draw(st.integers(0, len(blank) + len(self.evictable)))
        evicted = self.evictable[: max(0, count - len(blank))]
        allocated = self.pool.allocate(count)
        assert allocated == [*sorted(blank), *evicted][:count]  # low numbers, where memory is real
        for block in evicted:
            self.evictable.remove(block)
            del self.contents[block]
        seqs = [*self.seqs, []]
        seqs[data.draw(st.integers(0, len(self.seqs)))] += allocated
        self.seqs = [seq for seq in seqs if seq]

    @rule(data=st.data(), block_hash=st.sampled_from(HASHES))
    @precondition(lambda self: any(self.seqs))
    def set_hash(self, data: st.DataObject, block_hash: bytes) -> None:
        block = data.draw(st.sampled_from(sorted(self.used())))
        self.pool.set_hash(block, block_hash)
        if block not in self.contents and block_hash not in self.contents.values():
            self.contents[block] = block_hash

    @rule(hashes=st.lists(st.sampled_from(HASHES), max_size=6, unique=True))
    def incref(self, hashes: list[bytes]) -> None:
        found = self.pool.find_cached(hashes)
        assert found == self.expected(hashes)
        self.pool.incref(found)
        self.evictable = [block for block in self.evictable if block not in found]
        self.seqs.append(found)

    @rule(data=st.data())
    @precondition(lambda self: self.seqs)
    def free(self, data: st.DataObject) -> None:
        seq = self.seqs.pop(data.draw(st.integers(0, len(self.seqs) - 1)))
        self.pool.free(seq)
        self.evictable += [block for block in reversed(seq) if block in self.contents and block not in self.used()]

    def used(self) -> set[int]:
        return {block for seq in self.seqs for block in seq}

    def expected(self, hashes: list[bytes]) -> list[int]:
        blocks = {block_hash: block for block, block_hash in self.contents.items()}
        found = []
        for block_hash in hashes:
            if block_hash not in blocks:
                break
            found.append(blocks[block_hash])
        return found

    @invariant()
    def agree(self) -> None:
        check_pool(self.pool)
        used = self.used()
        assert (self.pool.num_used, self.pool.num_available) == (len(used), self.count - len(used))
        assert [self.pool.count_used([block]) for block in range(self.count)] == [n in used for n in range(self.count)]
        for block_hash in HASHES:
            assert self.pool.find_cached([block_hash]) == self.expected([block_hash])
            assert self.pool.is_used(block_hash) == any(block in used for block in self.expected([block_hash]))


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=100, stateful_step_count=40)
