"""How many tokens pay: the policy beside all ways to share the rows, and what it learns of costs."""

import itertools
from collections.abc import Sequence

import pytest

from tgis.speculation.policy import Policy, StepCosts

MEASURED = {1: 9.6, 2: 9.8, 4: 10.7, 6: 12.6, 8: 15.3, 9: 24.0, 10: 24.1, 12: 24.5, 16: 28.3}  # ms on a Zen 5


def counts(policy: Policy, rows: int, cumulative: Sequence[Sequence[float]]) -> list[int]:
    return policy.best(rows, cumulative)[1]


def taught(policy: Policy, costs: dict[int, float]) -> Policy:
    for rows, cost in costs.items():
        for _ in range(3):
            policy.step_succeeded(rows, cost / 1000)
    return policy


def chances(*each: float, most: int = 4) -> list[list[float]]:
    return [[chance**n for n in range(1, most + 1)] for chance in each]


@pytest.mark.parametrize("each", [(0.9,), (0.2,), (0.99, 0.5), (0.7, 0.7, 0.1)])
def test_no_other_way_gives_more_tokens_per_second(each: tuple[float, ...]) -> None:
    measured, cumulative = StepCosts(), chances(*each)
    for rows, cost in MEASURED.items():
        for _ in range(3):
            measured.add(rows, cost / 1000)
    costs = {rows: measured.seconds(rows) for rows in range(1, 17)}
    policy = taught(Policy(16), {rows: 1000 * cost for rows, cost in costs.items()})

    def rate(numbers: tuple[int, ...]) -> float:
        tokens = len(each) + sum(sum(own[:count]) for own, count in zip(cumulative, numbers, strict=True))
        return tokens / costs[len(each) + sum(numbers)]

    best, none = max(map(rate, itertools.product(range(5), repeat=len(each)))), rate((0,) * len(each))
    assert rate(tuple(counts(policy, len(each), cumulative))) == pytest.approx(best if best > 1.1 * none else none)


def test_a_step_without_proposals_is_measured_first() -> None:
    policy = Policy(16)
    assert not policy.may_pay(1)
    assert taught(policy, {1: 10}).may_pay(1)
    assert counts(taught(policy, {1: 10}), 1, chances(0.9)) == [4]  # nobody knows what they cost


def test_a_jump_is_not_crossed_for_little() -> None:
    likely, sure = ([[chance**n for n in range(1, 16)]] for chance in (0.95, 0.99))
    assert counts(taught(Policy(64), MEASURED), 1, likely)[0] < 8
    assert counts(taught(Policy(64), MEASURED), 1, sure)[0] > 12
    assert counts(taught(Policy(64), MEASURED | {16: 60.0}), 1, sure)[0] < 12
    assert counts(taught(Policy(6), MEASURED), 1, sure) == [5]  # rows of a step are limited
    assert sum(counts(taught(Policy(10), dict.fromkeys((8, 9, 10), 10)), 8, [[1.0] * 4] * 8)) == 2
    assert not taught(Policy(8), MEASURED).may_pay(8)
    assert counts(taught(Policy(9), {8: 15.3, 9: 24}), 8, [[1.0]] * 8) == [0] * 8


@pytest.mark.parametrize(("slope", "pays"), [(1.0, True), (1.5, True), (1.7, False), (3.0, False)])
def test_nothing_is_looked_up_where_even_certain_tokens_do_not_pay(slope: float, pays: bool) -> None:
    """Steps of 32 rows take 60 ms."""
    policy = taught(Policy(64), {rows: 60 + slope * (rows - 32) for rows in (1, 8, 32, 64)})
    assert policy.may_pay(32) == pays == any(counts(policy, 32, [[1.0] * 15] * 32))


def test_few_numbers_of_rows_are_tried_and_only_for_much() -> None:
    """Engines record and verify the first steps of each, which takes a multiple of the time."""
    for most, tried in {1: 2, 5: 6, 7: 8, 10: 8, 14: 8, 15: 16}.items():
        assert counts(taught(Policy(64), {1: 10}), 1, chances(0.95, most=most)) == [tried - 1]
    for cost, expected in {10.4: [8], 10.5: [0]}.items():  # 16 rows would give 1.52 or 1.43 times the tokens per second
        assert counts(taught(Policy(64), {8: 10, 9: cost}), 8, [[1.0] * 8]) == expected


def test_after_a_step_without_proposals_some_are_not_looked_at() -> None:
    policy = taught(Policy(64), {8: 10, 16: 12})
    assert counts(policy, 8, [[0.1]]) == [0]
    assert [policy.may_pay(8) for _ in range(6)] == [False] * 4 + [True] * 2
    counts(policy, 8, [[0.9] * 8])
    assert policy.may_pay(8)


@pytest.mark.parametrize(
    ("passes", "drafted"),
    [
        ({3: 9}, 3),
        ({3: 60}, 0),
        ({3: 60, 1: 1}, 1),
        ({1: 4}, 3),
        ({1: 8}, 3),
        ({1: 9.5}, 0),
        ({2: 60}, 0),
    ],  # ms by number
)
def test_drafting_takes_what_so_many_passes_took(passes: dict[int, float], drafted: int) -> None:
    policy = taught(Policy(16), {1: 10, 2: 10, 4: 10})
    for count, cost in passes.items():
        for _ in range(3):
            policy.step_succeeded(1 + count, (10 + cost) / 1000, count)
    assert policy.best(1, chances(0.99, most=3), [0])[1] == [drafted]


def test_steps_with_drafts_teach_what_is_not_known_of_them() -> None:
    policy = taught(Policy(16), {1: 10, 4: 10})
    for rows, seconds in [(4, 0.016)] * 3 + [(8, 0.026)] * 3:  # three passes take 6 ms
        policy.step_succeeded(rows, seconds, 3)
    assert policy.best(4, [[1.0] * 4]) == (1.0, [0])  # 8 rows take twice as long


def test_costs_are_measured_and_forgotten() -> None:
    costs = StepCosts()
    for seconds in (9.0, 9.0, 1.0):  # the first are recorded and verified
        costs.add(1, seconds)
    assert (costs.seconds(1), costs.seconds(5)) == (1.0, 1.0)
    for seconds in (9.0, 9.0, 3.0):
        costs.add(3, seconds)
    assert costs.seconds(2) == 2.0  # on the line between
    costs.add(3, 90.0)  # something else took the time
    assert costs.seconds(3) < 8
    for _ in range(100):
        costs.add(1, 2.0)  # everything has become slower
    assert 0.9 < costs.seconds(1) < 1.3
    for lasts in (True, False):
        for _ in range(900 if lasts else 100):
            costs.add(2, 1.0)
        assert costs.known(3) == lasts  # two measurements last 1024 steps
    for rows, seconds in [(5, 3.0)] * 3 + [(7, 1.0)] * 3:
        costs.add(rows, seconds)
    assert costs.seconds(6) == costs.seconds(5) > costs.seconds(7)  # they do not fall
