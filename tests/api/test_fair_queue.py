"""Which call of many connections starts next."""

import random

import pytest

from tgis.api.grpc.fair_queue import ARRIVING_SECONDS, MAX_ARRIVING, FairQueue

MAX_CALLS = 100


class Queue(FairQueue[str]):
    """Has a clock of its own; the first letter of a call is its connection."""

    def __init__(self, *calls: str) -> None:
        super().__init__(MAX_CALLS, lambda: self.time)
        self.time = 0.0
        for call in calls:
            self.add(call[0], call)

    def served(self) -> list[str]:
        """All calls in the order in which they start, if each message arrives at once."""
        taken = []
        while call := self.take():
            taken.append(call)
            self.arrived(call[0])
        return taken


def test_connections_take_turns() -> None:
    assert Queue("a1", "a2", "a3", "b1", "b2", "c1").served() == ["a1", "b1", "c1", "a2", "b2", "a3"]


def test_a_call_does_not_wait_for_the_backlog_of_another_connection() -> None:
    queue = Queue(*(f"a{number}" for number in range(50)))
    assert queue.take() == "a0"
    queue.arrived("a")
    queue.add("b", "b1")
    assert queue.served()[:2] == ["a1", "b1"]


def test_one_message_of_a_connection_arrives_at_a_time() -> None:
    queue = Queue("a1", "a2", "b1")
    assert [queue.take(), queue.take(), queue.take()] == ["a1", "b1", None]
    queue.add("b", "b2")
    assert queue.take() is None
    queue.arrived("b")
    assert [queue.take(), queue.take()] == ["b2", None]
    queue.arrived("a")
    assert queue.take() == "a2"


def test_a_message_that_is_late_keeps_no_other_from_its_turn() -> None:
    queue = Queue("a1", "a2")
    assert queue.take() == "a1"
    queue.time += ARRIVING_SECONDS * 0.9
    assert queue.take() is None
    queue.time += ARRIVING_SECONDS * 0.2
    assert queue.take() == "a2"


def test_few_messages_arrive_at_a_time() -> None:
    queue = FairQueue[int](MAX_CALLS)
    for number in range(MAX_ARRIVING + 2):
        queue.add(str(number), number)
    assert [queue.take() for _ in range(MAX_ARRIVING + 1)] == [*range(MAX_ARRIVING), None]
    queue.arrived("3")
    assert [queue.take(), queue.take()] == [MAX_ARRIVING, None]


def test_the_oldest_calls_of_a_connection_with_more_than_it_may_have_are_dropped() -> None:
    queue = Queue(*(f"a{number}" for number in range(MAX_CALLS + 2)))
    assert queue.served() == [f"a{number}" for number in range(2, MAX_CALLS + 2)]


def test_it_tells_when_a_call_may_start() -> None:
    queue, told = Queue(), list[str]()
    queue.on_ready = lambda: told.append("ready")
    queue.add("a", "a1")
    assert told == ["ready"]
    queue.take()
    queue.arrived("a")
    assert told == ["ready"] * 2
    queue.arrived("a")  # nothing has changed
    assert told == ["ready"] * 2


def test_dropped_calls_do_not_start() -> None:
    queue = Queue("a1", "b1")
    queue.clear()
    assert (queue.take(), len(queue)) == (None, 0)


@pytest.mark.parametrize("seed", range(20))
def test_every_call_starts_once_in_the_order_of_its_connection(seed: int) -> None:
    """Events in random order; no connection has a second turn while another one waits for its first."""
    draw, queue = random.Random(seed), Queue()
    waiting: dict[str, list[str]] = {}
    arriving: set[str] = set()
    skipped: dict[str, set[str]] = {}  # by connection that could have a turn: those that had one since
    for number in range(1000):
        connection = draw.choice("abcdefghijklmnopqrstuvwxyz")
        match draw.randrange(3):
            case 0:
                call = f"{connection}{number}"
                queue.add(connection, call)
                waiting.setdefault(connection, []).append(call)
            case 1:
                queue.arrived(connection)
                arriving.discard(connection)
            case 2:
                taken = queue.take()
                if taken is None:
                    assert len(arriving) == MAX_ARRIVING or set(waiting) <= arriving
                else:
                    started = taken[0]
                    assert started not in arriving
                    assert waiting[started].pop(0) == taken
                    skipped.pop(started, None)
                    if not waiting[started]:
                        del waiting[started]
                    arriving.add(started)
                    for had_turns in skipped.values():
                        assert started not in had_turns
                        had_turns.add(started)
        skipped = {each: skipped.get(each, set()) for each in waiting if each not in arriving}
