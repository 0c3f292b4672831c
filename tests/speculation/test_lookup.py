"""What lookup expects, by hand and beside a search through the whole sequence; whether it or a model proposes."""

import random

import pytest

from tgis.speculation.acceptance import AcceptanceRates, kind_of_match
from tgis.speculation.lookup import Lookup
from tgis.speculation.speculator import Speculator


def expected(tokens: list[int], count: int, start: int = 0) -> list[int]:
    lookup, shared = Lookup(tokens, start), AcceptanceRates()
    lookup.advance(shared)
    return lookup.expected(count) if lookup.cumulative(shared, count) else []


@pytest.mark.parametrize(
    ("tokens", "start", "then"),
    [
        ([], 0, []),
        ([1], 0, []),
        ([1, 2, 3, 4], 0, []),  # nothing comes twice
        ([1, 2, 3, 9, 1], 0, []),  # one token is no match
        ([1, 2, 3, 4, 1, 2], 0, [3, 4, 1]),
        ([1, 2, 3, 4, 1, 2], 1, []),  # the first token is a placeholder
        ([7, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2], 0, [4, 7, 1]),  # of matches as long as each other the newest
        ([7, 8, 1, 2, 3, 9, 9, 1, 2, 4, 7, 8, 1, 2], 0, [3, 9, 9]),  # the longest
        ([1, 2, 3, 5, 1, 2, 3, 6, 1, 2, 4, 7, 1, 2], 0, [3, 6, 1]),  # the most frequent
        ([1, 2, 3, 5, 1, 2, 3, 5, 1, 2, 3, 6, 1, 2], 0, [3, 5, 1]),
        ([9, 1, 2, 1, 2], 0, [1, 2, 1]),  # a period repeats
    ],
)
def test_the_longest_match_and_its_most_frequent_continuation(tokens: list[int], start: int, then: list[int]) -> None:
    assert expected(tokens, 3, start) == then


@pytest.mark.parametrize(
    ("prompt", "predicted", "output", "then"),
    [
        ([], [5, 6, 7, 8], [5], [6, 7, 8]),  # from its beginning
        ([1], [5, 6, 7, 8], [5, 6, 7], [8]),
        ([1], [5, 6, 7], [5, 6, 7], []),  # nothing follows
        ([7, 4], [5, 6], [9, 6, 7], []),  # its end and the input are no pair
        ([1, 2], [5, 6, 7, 8], [9], []),  # after a deviation nothing
        ([1, 2], [5, 6, 7, 8, 3], [9, 6], []),
        ([1, 2], [5, 6, 7, 8, 3], [9, 6, 7], [8, 3]),  # until a pair of it comes again
        ([6, 7, 4], [5, 6, 7, 8], [6, 7], [4, 6, 7]),  # of matches as long as each other the newest
        ([6, 7, 4], [1, 5, 6, 7, 8], [9, 1, 5, 6, 7], [8]),  # the longest
    ],
)
def test_a_prediction(prompt: list[int], predicted: list[int], output: list[int], then: list[int]) -> None:
    """Whether it is read token by token or, after a preemption, at once; beside placeholders of a soft prompt."""
    for known in range(1, len(output) + 1):
        tokens, shared = [0, 0, *prompt, *output[:known]], AcceptanceRates()
        lookup = Lookup(tokens, 2, predicted, 2 + len(prompt))
        for token in [*output[known:], None]:
            lookup.advance(shared)
            count = len(lookup.cumulative(shared, 3))
            proposed = lookup.expected(count) if count else []
            tokens += [token] if token is not None else []
        assert proposed == then


def test_a_prediction_is_trusted_as_if_sixteen_tokens_of_it_had_come_true() -> None:
    shared, one = AcceptanceRates(), AcceptanceRates(per_sequence=True)
    for _ in range(16):
        one.add(6, hit=True)
    lookup = Lookup([1], 0, [5, 6, 7], 1)
    assert lookup.cumulative(shared, 2) == [rate := one.rate(6, shared), rate * rate]


def test_acceptance_rates_follow_the_sampled_tokens() -> None:
    shared, word = AcceptanceRates(), [*range(30)]
    tokens = word * 2
    lookup = Lookup(tokens, 0)
    lookup.advance(shared)
    assert lookup.cumulative(shared, 9) == [0.5**n for n in range(1, 6)]  # none follows a probability below 1/20
    for token in word * 3:
        tokens.append(token)
        lookup.advance(shared)
        lookup.cumulative(shared, 1)
    assert lookup.cumulative(shared, 3)[2] > 0.9
    other = Lookup([5, 6, 7, 8, 9, 5, 6, 7, 8], 0)
    other.advance(shared)
    assert 0.4 < other.cumulative(shared, 1)[0] < 0.6  # of short matches none has been seen


def test_what_rates_remember() -> None:
    """Of one sequence less than of all; of late positions in a draft one rate, which drifts to one half."""
    assert [*map(kind_of_match, (1, 2, 3, 4, 31, 32, 63, 64, 999))] == [0, 1, 1, 2, 4, 5, 5, 6, 6]
    prior, every, one = AcceptanceRates(), AcceptanceRates(), AcceptanceRates(per_sequence=True)
    for hit in [True] * 200 + [False] * 20:
        every.add(0, hit)
        one.add(0, hit)
    assert one.rate(0, prior) < 0.5 < every.rate(0, prior)
    for _ in range(9):
        every.add_draft(range(20), range(20))
    assert len({*every.cumulative_of_draft(prior, 20)}) == 20
    for _ in range(60_000):
        every.decay_to_prior()
    assert every.rate(15, prior) == pytest.approx(0.5, abs=0.001)


def test_a_long_input_is_indexed_bit_by_bit() -> None:
    draw, shared = random.Random(1), AcceptanceRates()
    tokens = [draw.randrange(5) for _ in range(5000)]
    lookup = Lookup(tokens, 0)
    for _ in range(2):
        lookup.advance(shared)
        assert lookup.cumulative(shared, 1) == []
    lookup.advance(shared)
    assert lookup.cumulative(shared, 1)


@pytest.mark.parametrize(("row_seconds", "expected"), [(0.0, 15), (0.004, 3)])
def test_a_prediction_may_be_longer_than_other_proposals_where_that_pays(row_seconds: float, expected: int) -> None:
    speculator, lookup = Speculator(2, 16, 33), Lookup([1], 0, range(50), 1)
    for rows in [1, 4, 16] * 3:
        speculator.policy.step_succeeded(rows, 0.01 + max(rows - 4, 0) * row_seconds)
    assert speculator.propose(1, [(lookup, 100)]) == [[*range(expected)]]
    assert speculator.propose(1, [(lookup, 2)]) == [[0, 1]]
    copied = [(Lookup([*range(50), *range(end)], 0), 100) for end in (20, 32)]
    assert [speculator.propose(1, [one]) for one in copied] == [[[20, 21]], [[32]]]  # the vocabulary ends there


DRAFTED = 3


def taught(pass_seconds: float, right: int, max_drafting: int = 8, most: int = 7) -> tuple[Speculator, Lookup]:
    """Steps take 10 ms and 0.1 more for each row; so many of the drafts' tokens have been right."""
    speculator, lookup = Speculator(most, 16, 1000, DRAFTED, max_drafting), Lookup([*range(50)], 0)
    for _ in range(20):
        for rows in (1, 2, 3, 4, 8):
            speculator.policy.step_succeeded(rows, 0.01 + rows / 10_000)
        speculator.policy.step_succeeded(4, 0.0104 + DRAFTED * pass_seconds, DRAFTED)
        speculator.drafted(lookup, [1, 2, 3], [*[1, 2, 3][:right], 9])
    return speculator, lookup


@pytest.mark.parametrize(
    ("pass_seconds", "right", "asked"), [(0.001, 3, 3), (0.001, 1, 1), (0.001, 0, 0), (0.02, 3, 0), (0.0, 2, 2)]
)
def test_a_model_drafts_as_much_as_pays(pass_seconds: float, right: int, asked: int) -> None:
    speculator, lookup = taught(pass_seconds, right)
    assert speculator.propose(1, [(lookup, 100)]) == [asked or []]
    assert speculator.propose(1, [(lookup, 1)]) == [min(asked, 1) or []]


def test_lookup_proposes_where_it_expects_more() -> None:
    speculator, lookup = taught(0.001, 1)
    copied = Lookup([*range(50), *range(30)], 0)
    for token in range(30, 45):
        copied.advance(speculator._rates)
        copied.cumulative(speculator._rates, 7)
        copied._tokens.append(token)
    tokens, count = speculator.propose(2, [(copied, 100), (lookup, 100)])
    assert isinstance(tokens, list)
    assert (tokens, count) == ([*range(45, 50)], 1)


def test_a_large_step_gets_no_drafts() -> None:
    speculator, lookup = taught(0.001, 3, max_drafting=1)
    assert speculator.propose(2, [(lookup, 100)] * 2) == [[], []]
    assert speculator.propose(1, [(lookup, 100)]) == [3]
    speculator, lookup = taught(0.001, 3, most=2)
    assert speculator.propose(1, [(lookup, 100)]) == [2]


def test_drafts_that_were_wrong_are_tried_again() -> None:
    speculator, _ = taught(0.0, 0)
    fresh, tries = Lookup([1], 0), 0
    while speculator.propose(1, [(fresh, 100)]) == [[]]:
        tries += 1
    assert 100 < tries < 10_000
