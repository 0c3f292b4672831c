"""Which call of many connections starts next."""

import random

import pytest

from tgis.api.grpc import fair_queue
from tgis.api.grpc.fair_queue import ARRIVING_SECONDS, MAX_ARRIVING, PAUSE_SECONDS, SPARSE_SECONDS, FairQueue

MAX_CALLS = 100


class Queue(FairQueue):
    """Has a clock of its own; the first letter of a call is its connection."""

    def __init__(self, *calls: str) -> None:
        super().__init__(MAX_CALLS, lambda: self.time)
        self.time = 0.0
        for call in calls:
            self.add(call[0], call)

    def served(self) -> list[str]:
        """All calls in the order in which they start, if each message arrives at once."""
        taken = []
        while len(self):
            if call := self.take():
                taken.append(call)
                self.arrived(call[0])
            else:
                self.time += PAUSE_SECONDS
        return taken


def test_a_call_does_not_wait_for_the_backlog_of_another_connection() -> None:
    queue = Queue(*(f"a{number}" for number in range(50)))
    assert queue.take() == "a0"
    queue.arrived("a")
    queue.add("b", "b1")
    assert queue.served()[:2] == ["b1", "a1"]


def pausing() -> Queue:
    """After a call of a connection without a backlog, and all of the other's that may start at once."""
    queue = Queue("b1", *(f"a{number}" for number in range(MAX_CALLS)))
    num_started = 0
    while call := queue.take():
        queue.arrived(call[0])
        num_started += 1
    assert 20 < num_started < MAX_CALLS / 2
    return queue


def test_calls_of_a_backlog_start_with_pauses_while_others_call_one_at_a_time() -> None:
    queue = pausing()
    queue.add("c", "c1")
    assert queue.take() == "c1"
    queue.time += PAUSE_SECONDS * 1.01
    assert [queue.take() is None, queue.take()] == [False, None]


def test_a_large_message_makes_the_pause_longer() -> None:
    queue = pausing()
    queue.arrived("a", num_bytes=4 << 20)
    queue.time += 15 * PAUSE_SECONDS
    assert queue.take() is None
    queue.time += 2 * PAUSE_SECONDS
    assert queue.take() is not None


def test_large_messages_of_other_connections_do_not_keep_a_backlog_waiting() -> None:
    queue = pausing()
    for number in range(100):
        queue.add("c", f"c{number}")
        assert queue.take() == f"c{number}"
        queue.arrived("c", num_bytes=4 << 20)
    queue.time += PAUSE_SECONDS * 1.01
    assert queue.take() is not None


def test_there_are_no_pauses_while_all_connections_have_a_backlog() -> None:
    queue = Queue("a1", "a2", "a3", "b1", "b2")
    assert [queue.take(), queue.take()] == ["a1", "b1"]
    queue.arrived("a", num_bytes=4 << 20)
    queue.arrived("b", num_bytes=4 << 20)
    assert [queue.take(), queue.take()] == ["a2", "b2"]
    queue.arrived("a")
    assert queue.take() == "a3"


def test_the_pauses_end_some_time_after_the_last_call_of_another_connection() -> None:
    queue = Queue("a1", "a2", "a3", "b1")
    assert [queue.take(), queue.take()] == ["a1", "b1"]
    queue.arrived("b")
    queue.arrived("a", num_bytes=1 << 30)
    queue.time += SPARSE_SECONDS * 0.9
    assert queue.take() is None
    queue.time += SPARSE_SECONDS * 0.2
    assert queue.take() == "a2"


def test_a_message_that_is_late_keeps_no_other_from_its_turn() -> None:
    queue = Queue(*(f"a{number}" for number in range(MAX_ARRIVING + 1)))
    assert [queue.take() for _ in range(MAX_ARRIVING)] == [f"a{number}" for number in range(MAX_ARRIVING)]
    queue.time += ARRIVING_SECONDS * 0.9
    assert queue.take() is None
    queue.time += ARRIVING_SECONDS * 0.2
    assert queue.take() == f"a{MAX_ARRIVING}"


def test_the_oldest_calls_of_a_connection_with_more_than_it_may_have_are_dropped() -> None:
    queue = Queue(*(f"a{number}" for number in range(MAX_CALLS + 2)))
    assert queue.served() == [f"a{number}" for number in range(2, MAX_CALLS + 2)]


@pytest.mark.parametrize("seed", range(20))
def test_every_call_starts_once_in_the_order_of_its_connection(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Events in random order. No connection with a backlog has a second turn while another waits for its first."""
    monkeypatch.setattr(fair_queue, "PAUSE_SECONDS", 0)
    draw, queue = random.Random(seed), Queue()
    waiting: dict[str, list[str]] = {}
    arriving, sparse = list[str](), set[str]()
    skipped: dict[str, set[str]] = {}  # by connection with a backlog: those that had a turn since its last one
    for number in range(1000):
        connection = draw.choice("abcdefghijklmnopqrstuvwxyz")
        match draw.randrange(3):
            case 0:
                call = f"{connection}{number}"
                queue.add(connection, call)
                if connection not in waiting and connection not in arriving:
                    sparse.add(connection)
                waiting.setdefault(connection, []).append(call)
            case 1 if connection in arriving:
                queue.arrived(connection)
                arriving.remove(connection)
            case 2:
                taken = queue.take()
                if taken is None:
                    assert len(arriving) == MAX_ARRIVING or not waiting
                else:
                    started = taken[0]
                    assert started in (sparse or waiting)
                    assert waiting[started].pop(0) == taken
                    skipped.pop(started, None)
                    if not waiting[started]:
                        del waiting[started]
                    arriving.append(started)
                    for had_turns in [] if started in sparse else skipped.values():
                        assert started not in had_turns
                        had_turns.add(started)
                    sparse.discard(started)
        skipped = {each: skipped.get(each, set()) for each in waiting if each not in sparse}
