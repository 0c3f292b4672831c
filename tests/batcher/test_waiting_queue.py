"""The waiting queue: whose turn it is, by the books that the test keeps of every client."""

from collections import Counter, defaultdict
from itertools import count
from typing import Any

from batches import ids, request
from hypothesis import given, settings
from hypothesis import strategies as st

from tgis.batcher.sequence import Sequence
from tgis.batcher.waiting_queue import TOKENS_PER_ROUND, WaitingQueue

CLIENTS = (b"", b"a", b"b")
TOKENS = st.sampled_from([2, 50, 127, 128, 129, 200, 900])


class World:
    """The queue, and a batch that admits and loses requests as the test says."""

    def __init__(self) -> None:
        self.queue = WaitingQueue()
        self.running: list[Sequence] = []
        self.failed: list[Sequence] = []
        self.numbers = count()
        self.clock = count()

    def submit(self, client: bytes, tokens: list[int]) -> list[Sequence]:
        now = float(next(self.clock))
        seqs = [Sequence(request(next(self.numbers), n - 1, 1, client=client), now) for n in tokens]
        self.queue.append(seqs, self.running)
        return seqs

    def admit(self, number: int) -> Sequence:
        """The one at this place in the queue, which has overtaken those before it."""
        seq = list(self.queue)[number % len(self.queue)]
        assert self.queue.remove({seq.id}) == [seq]
        self.failed = [one for one in self.failed if one is not seq]
        self.running.append(seq)
        seq.was_scheduled, seq.retry_group = True, 0
        return seq

    def fail(self, number: int) -> None:
        step = self.running[: 1 + number % 4]
        for seq in step:
            seq.retry_group = 1
        self.queue.requeue(step)
        self.failed = sorted(step + self.failed, key=lambda seq: seq.turn)
        self.running = self.running[len(step) :]

    def preempt(self, number: int) -> None:
        self.queue.requeue([self.running.pop(number % len(self.running))])

    def cancel(self, number: int) -> None:
        gone = {seq.id for at, seq in enumerate(self.queue) if (at + number) % 3 == 0}
        assert {seq.id for seq in self.queue.remove(gone)} == gone
        self.failed = [seq for seq in self.failed if seq.id not in gone]

    def by_client(self) -> dict[bytes, list[int]]:
        """Ids in the order of the queue, without those of failed steps."""
        found = defaultdict(list)
        for seq in list(self.queue)[len(self.failed) :]:
            found[seq.request.client].append(seq.id)
        return found


EVENTS = st.lists(
    st.tuples(st.just("submit"), st.sampled_from(CLIENTS), st.lists(TOKENS, min_size=1, max_size=5))
    | st.tuples(st.sampled_from(["admit", "admit", "overtake", "fail", "preempt", "cancel", "end"]), st.integers(0, 9)),
    max_size=40,
)


@settings(max_examples=200)
@given(EVENTS)
def test_each_client_is_served_in_the_order_of_its_arrivals(events: list[tuple[Any, ...]]) -> None:
    """Ids are numbers of arrival; those of failed steps stay in front. So with one client all is first come first."""
    world = World()
    for kind, *arguments in events:
        if kind == "submit":
            before = list(world.queue)
            world.submit(*arguments)
            assert before[:1] == list(world.queue)[: len(before[:1])], "nobody gets before who is first"
        elif kind == "end":
            world.running = world.running[1:]
        elif len(world.queue) and kind in ("admit", "overtake"):
            world.admit(arguments[0] if kind == "overtake" else 0)
        elif kind == "cancel" or (world.running and kind in ("fail", "preempt")):
            getattr(world, kind)(*arguments)
        assert list(world.queue)[: len(world.failed)] == world.failed
        assert all(waiting == sorted(waiting) for waiting in world.by_client().values())
        assert len(world.queue) == len(list(world.queue))


@given(st.lists(TOKENS, min_size=1, max_size=60), st.lists(TOKENS, min_size=1, max_size=60), st.integers(0, 50))
def test_clients_that_wait_get_as_many_tokens(first: list[int], second: list[int], earlier: int) -> None:
    """As much as their largest requests, and a round, allow; whoever came first."""
    world = World()
    for tokens in first:
        world.submit(b"first", [tokens])
    for _ in range(min(earlier, len(first) - 1)):
        world.admit(0)
    left = Counter({b"first": len(world.queue), b"second": len(second)})
    world.submit(b"second", second)
    served: Counter[bytes] = Counter()
    while min(left.values()):
        seq = world.admit(0)
        left[seq.request.client] -= 1
        served[seq.request.client] += seq.max_length
        assert abs(served[b"first"] - served[b"second"]) <= max(first) + max(second) + TOKENS_PER_ROUND


@given(st.lists(st.lists(TOKENS, min_size=1, max_size=30), max_size=5), st.lists(st.integers(0, 64), max_size=60))
def test_a_new_client_waits_for_a_round_of_the_others(floods: list[list[int]], admitted: list[int]) -> None:
    """And for the last request of each that begins in this round, whatever has overtaken what."""
    world = World()
    for number, tokens in enumerate(floods):
        world.submit(b"flood %d" % number, tokens)
    for place in admitted[: len(world.queue)]:
        world.admit(place)
    (new,) = world.submit(b"new", [900])
    ahead = defaultdict(list)
    for seq in list(world.queue)[: list(world.queue).index(new)]:
        ahead[seq.request.client].append(seq.max_length)
    assert all(sum(tokens[:-1]) <= TOKENS_PER_ROUND for tokens in ahead.values())


@given(st.integers(1, 2000), st.integers(1, 20), TOKENS)
def test_new_clients_without_end_starve_nobody(tokens: int, queued: int, of_new: int) -> None:
    """One comes for each that is admitted. A request waits for as many rounds as its client has tokens before it."""
    world, clients = World(), (b"new %d" % number for number in count())
    _, waits = world.submit(b"old", [1 + tokens, 2])
    for _ in range(queued):
        world.submit(next(clients), [of_new])
    for _ in range((tokens // TOKENS_PER_ROUND + 3) * (queued + 2)):
        if world.admit(0) is waits:
            break
        world.submit(next(clients), [of_new])
    assert waits in world.running


def test_cancelled_requests_cost_their_client_no_turns() -> None:
    world = World()
    world.submit(b"other", [200] * 9)
    flood = world.submit(b"careless", [900] * 9)
    world.queue.remove(set(ids(flood)))
    (late,) = world.submit(b"careless", [200])
    assert list(world.queue).index(late) == 1
