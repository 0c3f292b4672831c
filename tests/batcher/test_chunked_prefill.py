"""Chunked prefill beside decodes: the time to the first token, with step times from a formula."""

from statistics import median

import pytest
from batches import limits, next_plan, request

from tgis.batcher.batcher import Batcher
from tgis.batcher.prefill_budget import DecodeTimes
from tgis.batcher.sequence import StepPlan

BASE, PER_SEQ, PER_TOKEN = 10.0, 0.4, 0.3  # milliseconds
PER_ATTENDED = 5e-6  # for each token that a token attends to
MAX_SLOWDOWN = 2.5
NEW = 128


def milliseconds(plan: StepPlan) -> float:
    tokens = sum(plan.num_scheduled_tokens)
    seen = sum(seq.num_computed_tokens * count for seq, count in zip(plan.seqs, plan.num_scheduled_tokens, strict=True))
    return BASE + PER_SEQ * len(plan.seqs) + PER_TOKEN * (tokens - len(plan.seqs)) + PER_ATTENDED * seen


class World:
    """A batcher and a clock."""

    def __init__(self) -> None:
        bounds = limits(
            10**6, max_batch_size=64, prefill_tokens=512, padded=False, block_size=16, max_slowdown=MAX_SLOWDOWN
        )
        self.batcher = Batcher(bounds, ())
        self.now = 0.0
        self.first: dict[int, float] = {}  # request id -> time of its first token
        self._count = 0

    def submit(self, length: int, max_new: int = NEW) -> int:
        self._count += 1
        self.batcher.submit([request(self._count, length, max_new)], self.now)
        return self._count

    def step(self) -> int:
        """How many requests ended."""
        plan = next_plan(self.batcher, self.now)
        self.now += milliseconds(plan)
        for seq in plan.sampled:
            self.first.setdefault(seq.id, self.now)
        return len(self.batcher.commit(plan, [[7]] * len(plan.sampled), self.now))


@pytest.mark.parametrize("before", [1, 8, 32])
def test_many_clients_get_their_first_tokens_soon_whatever_ran_before(before: int) -> None:
    """32 clients in a closed loop, after a time with another number of them."""
    world = World()
    for clients in (before, 32):
        sent = {world.submit(130): world.now for _ in range(clients - len(world.batcher.running))}
        for _ in range(1000):
            for _ in range(world.step()):
                sent[world.submit(130)] = world.now
    waits = [world.first[asked] - sent[asked] for asked in sent if asked in world.first]
    assert median(waits) < 10 * (BASE + 32 * PER_SEQ)


def test_unseen_batch_sizes_are_extrapolated() -> None:
    times = DecodeTimes()
    assert times.expected(5) is None
    times.add(20, 2.0)
    assert [times.expected(size) for size in (1, 16, 31, 32, 100)] == [2.0, 2.0, 2.0, 4.0, 8.0]
    times.add(1, 1.0)
    assert (times.expected(1), times.expected(2), times.expected(15), times.expected(16)) == (1.0, 2.0, 8.0, 2.0)
    times.add(17, 3.0)
    assert times.expected(20) == pytest.approx(2.1)
