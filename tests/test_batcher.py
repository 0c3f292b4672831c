"""The batcher under a made-up clock and random arrivals: every request ends once, for the right reason."""

from collections.abc import Iterable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tgis.batcher.batcher import Batcher
from tgis.batcher.sequence import Plan, Sequence
from tgis.batcher.weights import Limits, padding_share, peak_weight, prefill_tokens
from tgis.messages import Details, Request, Sampling, StopReason

EOS = 99
Arrival = tuple[int, int, float | None, int, int | None]  # input, output, deadline, arrival, cancel


def limits(**changes: Any) -> Limits:
    values: dict[str, Any] = {
        "max_batch_size": 4,
        "weight": 1000,
        "prefill_tokens": 64,
        "max_padding": 1.0,
        "padded": True,
    }
    return Limits(**(values | changes))


def request(
    request_id: int,
    length: int = 3,
    max_new: int = 5,
    *,
    capped: bool = False,
    deadline: float | None = None,
    min_new: int = 0,
) -> Request:
    sampling = Sampling(min_new_tokens=min_new)
    tokens = list(range(1, length + 1))
    return Request(request_id, tokens, max_new, capped, sampling, Details(), deadline)


def ids(rows: Iterable[Sequence]) -> list[int]:
    return [row.id for row in rows]


def planned(batcher: Batcher) -> Plan:
    plan = batcher.plan()
    assert plan is not None
    return plan


def run_one(batcher: Batcher, token: int = 7, now: float = 0.0) -> tuple[Plan, list[Sequence]]:
    plan = planned(batcher)
    return plan, batcher.commit(plan, [token] * len(plan.rows), now)


def generated(batcher: Batcher, the_request: Request, tokens: list[int], now: float = 0.0) -> Sequence:
    """The row after the tokens have come one by one, or as many of them as it took to end it."""
    batcher.submit([the_request], 0.0)
    for token in tokens:
        plan, ended = run_one(batcher, token, now)
        if ended:
            break
    return plan.rows[0]


def test_a_request_ends_with_its_last_allowed_token() -> None:
    row = generated(Batcher(limits(), {EOS}), request(1, max_new=3), [7] * 10)
    assert (row.generated, row.end) == (3, StopReason.MAX_TOKENS)


def test_a_request_that_had_to_be_shortened_ends_with_token_limit() -> None:
    row = generated(Batcher(limits(), {EOS}), request(1, max_new=3, capped=True), [7] * 10)
    assert row.end is StopReason.TOKEN_LIMIT


def test_eos_on_the_last_allowed_token_is_eos() -> None:
    row = generated(Batcher(limits(), {EOS}), request(1, max_new=2), [7, EOS])
    assert (row.generated, row.end) == (2, StopReason.EOS_TOKEN)


def test_any_of_several_eos_ids_ends() -> None:
    row = generated(Batcher(limits(), {EOS, 98}), request(1), [7, 98])
    assert (row.generated, row.end) == (2, StopReason.EOS_TOKEN)


def test_eos_before_the_minimum_does_not_end() -> None:
    row = generated(Batcher(limits(), {EOS}), request(1, min_new=3), [EOS, EOS, EOS])
    assert (row.generated, row.end) == (3, StopReason.EOS_TOKEN)


def test_the_time_limit_beats_everything_and_keeps_the_token() -> None:
    row = generated(Batcher(limits(), {EOS}), request(1, deadline=5.0, min_new=4), [EOS], now=5.001)
    assert (row.generated, row.end) == (1, StopReason.TIME_LIMIT)


def test_a_deadline_is_late_only_after_it() -> None:
    row = generated(Batcher(limits(), {EOS}), request(1, deadline=5.0, max_new=1), [7], now=5.0)
    assert row.end is StopReason.MAX_TOKENS


def test_a_request_expires_in_the_queue_without_a_token() -> None:
    batcher = Batcher(limits(max_batch_size=1), {EOS})
    batcher.submit([request(1), request(2, deadline=1.0)], 0.0)
    run_one(batcher)
    assert ids(batcher.expire(1.0)) == []
    (expired,) = batcher.expire(1.1)
    assert (expired.id, expired.generated, expired.end) == (2, 0, StopReason.TIME_LIMIT)
    assert batcher.waiting == 0


def test_rows_join_a_running_batch_and_leave_it_at_any_step() -> None:
    batcher = Batcher(limits(), {EOS})
    batcher.submit([request(1, max_new=2)], 0.0)
    assert ids(run_one(batcher)[0].rows) == [1]
    batcher.submit([request(2)], 0.0)
    plan, ended = run_one(batcher)  # no second prefill before the running row has had its token
    assert (plan.prefill, ids(plan.rows), ids(ended)) == (False, [1], [1])
    plan, _ = run_one(batcher)
    assert (plan.prefill, ids(plan.rows)) == (True, [2])


def test_prefills_alternate_with_steps_of_the_running_rows() -> None:
    batcher = Batcher(limits(prefill_tokens=3), {EOS})
    batcher.submit([request(n) for n in range(3)], 0.0)
    kinds = [run_one(batcher)[0].prefill for _ in range(5)]
    assert kinds == [True, False, True, False, True]


def test_the_batch_size_bounds_the_rows() -> None:
    batcher = Batcher(limits(max_batch_size=2), {EOS})
    batcher.submit([request(n) for n in range(5)], 0.0)
    run_one(batcher)
    run_one(batcher)
    assert (batcher.running, batcher.waiting) == (2, 3)


def test_the_weight_counts_rows_times_the_longest_with_its_output() -> None:
    batcher = Batcher(limits(weight=3 * (10 + 5)), {EOS})
    batcher.submit([request(1, 10), request(2, 2), request(3, 2), request(4, 2)], 0.0)
    assert ids(planned(batcher).rows) == [1, 2, 3]


def test_without_padding_the_weight_is_a_sum() -> None:
    batcher = Batcher(limits(weight=(10 + 5) + 2 * (2 + 5), padded=False), {EOS})
    batcher.submit([request(1, 10), request(2, 2), request(3, 2), request(4, 2)], 0.0)
    assert ids(planned(batcher).rows) == [1, 2, 3]


def test_padding_closes_a_prefill() -> None:
    batcher = Batcher(limits(max_padding=0.2), {EOS})
    batcher.submit([request(1, 10), request(2, 8), request(3, 2)], 0.0)
    assert ids(run_one(batcher)[0].rows) == [1, 2]
    run_one(batcher)
    assert ids(run_one(batcher)[0].rows) == [3]


def test_a_request_that_needs_more_than_a_prefill_takes_runs_alone() -> None:
    batcher = Batcher(limits(prefill_tokens=8, weight=10), {EOS})
    batcher.submit([request(1, 50), request(2, 2)], 0.0)
    assert ids(run_one(batcher)[0].rows) == [1]


def test_nobody_overtakes_the_first_that_does_not_fit() -> None:
    batcher = Batcher(limits(weight=40), {EOS})
    batcher.submit([request(1, 3), request(2, 30), request(3, 1)], 0.0)
    assert ids(planned(batcher).rows) == [1]
    assert batcher.waiting == 2


def test_cancelled_requests_leave_wherever_they_are() -> None:
    batcher = Batcher(limits(max_batch_size=1), {EOS})
    batcher.submit([request(1), request(2), request(3)], 0.0)
    run_one(batcher)
    assert ids(batcher.cancel([2, 1, 77])) == [1]
    assert (batcher.running, batcher.waiting) == (0, 1)
    assert ids(run_one(batcher)[0].rows) == [3]


def test_abandoned_rows_are_gone() -> None:
    batcher = Batcher(limits(), {EOS})
    batcher.submit([request(1), request(2)], 0.0)
    plan = planned(batcher)
    batcher.abandon(plan.rows[:1])
    assert batcher.running == 1
    assert not batcher.idle


def test_measures_of_rows() -> None:
    batcher = Batcher(limits(), {EOS})
    batcher.submit([request(1, 10, max_new=5), request(2, 6, max_new=20)], 0.0)
    rows = planned(batcher).rows
    assert peak_weight(rows, padded=True) == 2 * 26
    assert peak_weight(rows, padded=False) == 15 + 26
    assert prefill_tokens(rows, padded=True) == 20
    assert prefill_tokens(rows, padded=False) == 16
    assert padding_share(rows) == 4 / 20
    assert padding_share([]) == 0


ARRIVALS = st.lists(
    st.tuples(
        st.integers(1, 30),  # input
        st.integers(1, 8),  # output
        st.sampled_from([None, 3.0, 10.0]),  # deadline
        st.integers(0, 20),  # arrives at this step
        st.one_of(st.none(), st.integers(0, 40)),  # cancelled at this step
    ),
    max_size=25,
)


@settings(max_examples=200, deadline=None)
@given(ARRIVALS, st.booleans(), st.sampled_from([0.0, 0.2, 1.0]))
def test_every_request_ends_exactly_once_within_the_limits(
    arrivals: list[Arrival], padded: bool, max_padding: float
) -> None:
    bounds = limits(weight=120, prefill_tokens=40, padded=padded, max_padding=max_padding)
    batcher = Batcher(bounds, {EOS})
    requests = [request(n, i, o, deadline=d) for n, (i, o, d, _, _) in enumerate(arrivals)]
    ended: list[Sequence] = []
    cancelled: set[int] = set()
    order: list[int] = []
    for step in range(500):
        now = step * 0.5
        batcher.submit([r for r, a in zip(requests, arrivals, strict=True) if a[3] == step], now)
        gone = {n for n, a in enumerate(arrivals) if a[4] == step and n not in ids(ended)}
        cancelled |= gone
        batcher.cancel(gone)
        ended += batcher.expire(now)
        plan = batcher.plan()
        if plan is None:
            continue
        if plan.prefill:
            order += ids(plan.rows)
        assert batcher.running <= bounds.max_batch_size
        ended += batcher.commit(plan, [7] * len(plan.rows), now)
    assert batcher.idle
    late_cancels = {row.id for row in ended} & cancelled  # cancelled before they were known
    assert all((arrivals[n][4] or 0) < arrivals[n][3] for n in late_cancels)
    assert sorted(ids(ended)) == sorted(set(range(len(arrivals))) - (cancelled - late_cancels))
    arrived = sorted(range(len(arrivals)), key=lambda n: (arrivals[n][3], n))
    assert order == [n for n in arrived if n in order]  # first come, first served
    for row in ended:
        assert row.end is StopReason.TIME_LIMIT or row.generated == row.request.max_new_tokens
