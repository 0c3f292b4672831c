"""The block pool under random operations, against a model of it that is as plain as can be."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tgis.batcher.block_pool import BlockPool

KEYS = [bytes([n]) for n in range(8)]


class Pool(RuleBasedStateMachine):
    """The model: the blocks of each row, and the labelled blocks in the order in which they were last given back."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(0)
        self.count = 0
        self.rows: list[list[int]] = []
        self.contents: dict[int, bytes] = {}
        self.left: list[int] = []  # labelled blocks that nobody uses, the longest unused first

    @rule(count=st.integers(0, 12))
    @precondition(lambda self: not self.count)
    def begin(self, count: int) -> None:
        self.count = count
        self.pool = BlockPool(count)

    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        """A row that is new, or one that grows."""
        blank = set(range(self.count)) - self.used() - set(self.left)
        count = data.draw(st.integers(0, len(blank) + len(self.left)))
        evicted = self.left[: max(0, count - len(blank))]
        taken = self.pool.allocate(count)
        assert len(taken) == len(set(taken)) == count
        assert blank.issuperset(taken) if not evicted else set(taken) == blank | set(evicted)
        for block in evicted:
            self.left.remove(block)
            del self.contents[block]
        rows = [*self.rows, []]
        rows[data.draw(st.integers(0, len(self.rows)))] += taken
        self.rows = [row for row in rows if row]

    @rule(data=st.data(), key=st.sampled_from(KEYS))
    @precondition(lambda self: any(self.rows))
    def label(self, data: st.DataObject, key: bytes) -> None:
        block = data.draw(st.sampled_from(sorted(self.used())))
        self.pool.set_hash(block, key)
        if block not in self.contents and key not in self.contents.values():
            self.contents[block] = key

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=6, unique=True))
    def share(self, keys: list[bytes]) -> None:
        found = self.pool.find_cached(keys)
        assert found == self.expected(keys)
        self.pool.incref(found)
        self.left = [block for block in self.left if block not in found]
        self.rows.append(found)

    @rule(data=st.data())
    @precondition(lambda self: self.rows)
    def give_back(self, data: st.DataObject) -> None:
        row = self.rows.pop(data.draw(st.integers(0, len(self.rows) - 1)))
        self.pool.free(row)
        self.left += [block for block in reversed(row) if block in self.contents and block not in self.used()]

    def used(self) -> set[int]:
        return {block for row in self.rows for block in row}

    def expected(self, keys: list[bytes]) -> list[int]:
        blocks = {key: block for block, key in self.contents.items()}
        found = []
        for key in keys:
            if key not in blocks:
                break
            found.append(blocks[key])
        return found

    @invariant()
    def agree(self) -> None:
        self.pool.check()
        used = self.used()
        assert (self.pool.num_used, self.pool.num_available) == (len(used), self.count - len(used))
        assert [self.pool.count_used([block]) for block in range(self.count)] == [n in used for n in range(self.count)]
        for key in KEYS:
            assert self.pool.find_cached([key]) == self.expected([key])
            assert self.pool.is_used(key) == any(block in used for block in self.expected([key]))


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
