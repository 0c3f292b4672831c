"""What the batcher says about itself to a person who asks why a request waits."""

from typing import Any

import pytest
from batches import EOS, limits, planned, request, run_one

from tgis.batcher.batcher import Batcher
from tgis.ipc.messages import Request
from tgis.ipc.snapshot import Refusal, RowState

CHUNKED = {"padded": False, "block_size": 1}


def test_a_request_waits_for_memory() -> None:
    batcher = Batcher(limits(weight=40), {EOS})
    batcher.submit([request(1, 3), request(2, 30)], 1.0)
    run_one(batcher, now=1.0)
    batcher.submit([request(3, 35)], 1.5)
    run_one(batcher, now=2.0)
    seen = batcher.snapshot(3.0, most=10)
    assert [(row.id, row.seconds, row.remaining) for row in seen.queue] == [(2, 2.0, 5), (3, 1.5, 5)]
    assert seen.rows == [RowState(1, 2.0, input=3, computed=4, generated=2, remaining=3)]
    assert (seen.context, seen.context_peak, seen.context_limit, seen.context_most) == (5, 8, 40, 40)
    assert (seen.refusal, seen.last_refusal, seen.last_refused) == (Refusal.MEMORY, Refusal.MEMORY, 1.0)


def refusal_of(turns: list[list[Request]], **kind: Any) -> Refusal | None:
    """Why the first in the queue waits after a step for each of these arrivals."""
    batcher = Batcher(limits(**kind), {EOS})
    for requests in turns:
        batcher.submit(requests, 0.0)
        run_one(batcher)
    return batcher.snapshot(1.0, most=1).refusal


@pytest.mark.parametrize(
    ("turns", "kind", "reason"),
    [
        ([[request(1)]], {}, None),
        ([[request(n) for n in range(9)]], {}, Refusal.BATCH_SIZE),
        ([[request(n) for n in range(4)], [request(9)]], {}, Refusal.BATCH_SIZE),
        ([[request(n) for n in range(4)], [request(9)]], CHUNKED, Refusal.BATCH_SIZE),
        ([[request(1, 50, 9), request(2, 50, 9)]], {"weight": 100}, Refusal.MEMORY),
        ([[request(1, 50, 9), request(2, 50, 9)]], {"weight": 100, **CHUNKED}, Refusal.MEMORY),
        ([[request(1, 40), request(2, 40)]], {}, Refusal.PREFILL),
        ([[request(1, 90), request(2, 90), request(3, 9)]], CHUNKED, Refusal.PREFILL),
        ([[request(1, 20), request(2, 2)]], {"max_padding": 0.1}, Refusal.PADDING),
        ([[request(1)], [request(2)]], {}, Refusal.PACE),
        ([[request(1)], [request(2)], []], {}, None),
    ],
)
def test_every_reason_to_wait_has_a_name(turns: list[list[Request]], kind: Any, reason: Refusal | None) -> None:
    assert refusal_of(turns, **kind) is reason


@pytest.mark.parametrize("kind", [{}, CHUNKED])
def test_rows_on_trial_wait_for_each_other(kind: Any) -> None:
    batcher = Batcher(limits(**kind), {EOS})
    batcher.submit([request(n) for n in range(4)], 0.0)
    batcher.retreat(planned(batcher), out_of_memory=False)
    run_one(batcher)
    assert batcher.snapshot(0.0, most=9).refusal is Refusal.TRIAL


def test_a_refusal_does_not_outlive_its_request() -> None:
    batcher = Batcher(limits(weight=100), {EOS})
    batcher.submit([request(1, 50, 9), request(2, 50, 9)], 0.0)
    run_one(batcher)
    batcher.cancel([2])
    batcher.submit([request(3, 50, 9, deadline=5.0)], 1.0)
    assert batcher.snapshot(1.0, most=9).refusal is None
    run_one(batcher, now=2.0)
    run_one(batcher, now=3.0)
    assert batcher.snapshot(3.0, most=9).refusal is Refusal.MEMORY
    batcher.expire(6.0)
    seen = batcher.snapshot(7.0, most=9)
    assert (seen.refusal, seen.last_refusal, seen.last_refused) == (None, Refusal.MEMORY, 4.0)


def test_a_refusal_is_not_that_of_rows_which_come_back() -> None:
    batcher = Batcher(limits(max_batch_size=2), {EOS})
    batcher.submit([request(n) for n in range(3)], 0.0)
    run_one(batcher)
    assert batcher.snapshot(0.0, most=9).refusal is Refusal.BATCH_SIZE
    batcher.retreat(planned(batcher), out_of_memory=False)
    seen = batcher.snapshot(0.0, most=9)
    assert ([row.id for row in seen.queue], seen.refusal) == ([0, 1, 2], None)


def test_so_many_rows_are_shown_and_all_are_counted() -> None:
    batcher = Batcher(limits(), {EOS})
    batcher.submit([request(n) for n in range(1000)], 0.0)
    run_one(batcher)
    seen = batcher.snapshot(0.0, most=3)
    assert (seen.running, seen.waiting) == (4, 996)
    assert [row.id for row in seen.rows] == [0, 1, 2]
    assert [row.id for row in seen.queue] == [4, 5, 6]


@pytest.mark.parametrize(("padded", "peak"), [(True, 2 * 30), (False, 30 + 20)])
def test_the_peak_is_that_of_the_step_in_which_rows_end(padded: bool, peak: int) -> None:
    batcher = Batcher(limits(padded=padded), {EOS})
    batcher.submit([request(1, 10, 10), request(2, 20, 10)], 0.0)
    run_one(batcher)
    seen = batcher.snapshot(0.0, most=0)
    assert (seen.context, seen.context_peak) == (2 * 21 if padded else 11 + 21, peak)


def test_prompts_that_are_not_done_count_in_full() -> None:
    batcher = Batcher(limits(prefill_tokens=8, **CHUNKED), {EOS})
    batcher.submit([request(1, 10, 10), request(2, 20, 10)], 0.0)
    run_one(batcher)
    seen = batcher.snapshot(0.0, most=9)
    assert seen.context_peak == 20 + 30
    assert [row.computed for row in seen.rows] == [4, 4]


def test_what_lack_of_memory_took_is_seen() -> None:
    batcher = Batcher(limits(), {EOS})
    batcher.submit([request(n, 10, 50) for n in range(2)], 0.0)
    run_one(batcher)
    batcher.retreat(planned(batcher), out_of_memory=True)
    seen = batcher.snapshot(0.0, most=3)
    assert seen.context_limit < 2 * 11 < seen.context_most == 1000
