"""The batcher's state: what runs, what waits, and why; the peak of a batch against the naive way."""

from typing import Any

import pytest
from batches import EOS, limits, next_plan, queued, request, run_step
from hypothesis import given, settings
from hypothesis import strategies as st

from tgis.batcher.batcher import Batcher
from tgis.batcher.capacity import PeakEstimator
from tgis.ipc.messages import BatchState, RequestState, WaitReason
from tgis.ipc.request import Request

CHUNKED = {"padded": False, "block_size": 1}
BLOCKS: Any = {"padded": False, "block_size": 4, "weight": 40, "prefill_tokens": 8}


def test_the_state() -> None:
    """Some of the sequences are shown, and all are counted."""
    batcher = Batcher(limits(weight=40), {EOS})
    batcher.submit([request(1, 3), request(2, 30)], 1.0)
    run_step(batcher, now=1.0)
    batcher.submit([request(3, 35)], 1.5)
    run_step(batcher, now=2.0)
    batcher._capacity.shrink_context(30)
    batcher._capacity.shrink_prefill(20)
    capacity = {"token_capacity": 27, "initial_token_capacity": 40}
    capacity |= {"max_prefill_tokens": 10, "initial_max_prefill_tokens": 64, "max_batch_size": 4}
    running, waiting = RequestState(1, 2.123, 3, 4, 2, 3), RequestState(2, 2.123, 30, 0, 0, 5)
    expected = BatchState(
        1, 2, WaitReason.MEMORY, 2, 5, **capacity, running_requests=[running], waiting_requests=[waiting]
    )
    assert batcher.state(3.1234, max_seqs=1) == expected


def wait_reason_after(turns: list[list[Request]], **kind: Any) -> WaitReason | None:
    """Why the first in the queue waits, after one step for each of these arrivals."""
    batcher = Batcher(limits(**kind), {EOS})
    for requests in turns:
        batcher.submit(requests, 0.0)
        run_step(batcher)
    return batcher.state(1.0, max_seqs=1).wait_reason


@pytest.mark.parametrize(
    ("turns", "kind", "reason"),
    [
        ([[request(1)]], {}, None),
        ([[request(n) for n in range(9)]], {}, WaitReason.BATCH_SIZE),
        ([[request(n) for n in range(4)], [request(9)]], {}, WaitReason.BATCH_SIZE),
        ([[request(n) for n in range(4)], [request(9)]], CHUNKED, WaitReason.BATCH_SIZE),
        ([[request(1, 50, 9), request(2, 50, 9)]], {"weight": 100}, WaitReason.MEMORY),
        ([[request(1), request(2)]], {"weight": 15}, WaitReason.MEMORY),
        ([[request(1), request(2)]], {"weight": 2 * 8}, None),  # both as long as they may become
        ([[request(1, 50, 9), request(2, 50, 9)]], {"weight": 100, **CHUNKED}, WaitReason.MEMORY),
        ([[request(1), request(2, 4)]], {"weight": 10, **CHUNKED}, WaitReason.MEMORY),  # each is left a spare block
        ([[request(1), request(2, 3)]], {"weight": 10, **CHUNKED}, None),
        ([[request(1, 24)], [request(2, 7)]], BLOCKS, WaitReason.MEMORY),  # the whole prompt of the first counts
        ([[request(1, 24)], [request(2, 3)]], BLOCKS, None),
        (
            [[request(1, 50, 9), request(2, 50, 9), request(3), request(4)]],
            {"weight": 100, "max_batch_size": 2, **CHUNKED},
            WaitReason.MEMORY,
        ),
        ([[request(1, 40), request(2, 40)]], {}, WaitReason.PREFILL_SIZE),
        (
            [[request(n, 90) for n in range(12)]],
            {"max_batch_size": 12, "weight": 9999, **CHUNKED},
            WaitReason.PREFILL_SIZE,
        ),
        ([[request(1, 20), request(2, 2)]], {"max_prefill_padding": 0.1}, WaitReason.PREFILL_PADDING),
        ([[request(1, 20), request(2, 2)]], {"max_prefill_padding": 0.45}, None),
        ([[request(1)], [request(2)]], {}, WaitReason.DECODES_FIRST),
        ([[request(1)], [request(2)], []], {}, None),
    ],
)
def test_wait_reasons(turns: list[list[Request]], kind: Any, reason: WaitReason | None) -> None:
    assert wait_reason_after(turns, **kind) is reason


@pytest.mark.parametrize(("kind", "steps"), [({}, 1), (CHUNKED, 1), ({"prefill_tokens": 2, **CHUNKED}, 2)])
def test_retry_groups_wait_for_each_other(kind: Any, steps: int) -> None:
    batcher = queued([request(n) for n in range(4)], **kind)
    batcher.rollback(next_plan(batcher), out_of_memory=False)
    for _ in range(steps):
        run_step(batcher)
    assert batcher.state(0.0, max_seqs=9).wait_reason is WaitReason.RETRY


def test_a_wait_reason_does_not_outlive_its_request() -> None:
    batcher = queued([request(1, 50, 9), request(2, 50, 9)], weight=100)
    run_step(batcher)
    batcher.cancel([2])
    batcher.submit([request(3, 50, 9, deadline=5.0)], 1.0)
    assert batcher.state(1.0, max_seqs=9).wait_reason is None
    run_step(batcher, now=2.0)
    run_step(batcher, now=3.0)
    assert batcher.state(3.0, max_seqs=9).wait_reason is WaitReason.MEMORY
    batcher.expire(6.0)
    assert batcher.state(7.0, max_seqs=9).wait_reason is None


def test_requeued_sequences_have_no_wait_reason_yet() -> None:
    batcher = queued([request(n) for n in range(3)], max_batch_size=2)
    run_step(batcher)
    assert batcher.state(0.0, max_seqs=9).wait_reason is WaitReason.BATCH_SIZE
    batcher.rollback(next_plan(batcher), out_of_memory=False)
    seen = batcher.state(0.0, max_seqs=9)
    assert ([seq.id for seq in seen.waiting_requests], seen.wait_reason) == ([0, 1, 2], None)


def test_lost_capacity_comes_back_also_from_a_single_token() -> None:
    batcher = Batcher(limits(200, prefill_tokens=100), {EOS})
    capacity, nothing = batcher._capacity, batcher.plan(0.0)

    def after(steps: int) -> tuple[int, int]:
        for _ in range(steps):
            batcher.commit(nothing, [], 0.0)
        return capacity.context_tokens, capacity.prefill_tokens

    assert after(100) == (200, 100)
    capacity.shrink_prefill(4)
    assert after(200) == (200, 2)
    capacity.shrink_context(100)
    assert [after(255), after(1)] == [(90, 2), (90 + 2, 2 + 1)]  # 256 steps after the last time
    assert after(256 * 110) == (200, 100)


Lengths = list[tuple[int, int]]  # length, remaining tokens
SEQS = st.lists(st.tuples(st.integers(1, 30), st.integers(0, 12)), max_size=7)


def naive_peak(seqs: Lengths, padded: bool) -> int:
    """The largest context over all steps until the last sequence has ended."""
    peak = 0
    for step in range(max((remaining for _, remaining in seqs), default=-1) + 1):
        lengths = [length + step for length, remaining in seqs if remaining >= step]
        peak = max(peak, len(lengths) * max(lengths) if padded else sum(lengths))
    return peak


@settings(max_examples=500)
@given(SEQS, SEQS, st.booleans(), st.integers(0, 260))
def test_a_sequence_fits_if_no_future_step_exceeds_the_limit(
    seqs: Lengths, candidates: Lengths, padded: bool, limit: int
) -> None:
    limit = max(limit, naive_peak(seqs, padded))
    estimator, batch = PeakEstimator(seqs, padded, limit), list(seqs)
    for length, remaining in candidates:
        fits = naive_peak([*batch, (length, remaining)], padded) <= limit
        assert estimator.fits(length, remaining) == fits
        assert fits or not estimator.fits_worst_case(length, remaining)
        if fits:
            estimator.add(length, remaining)
            batch.append((length, remaining))
