"""Who proposes: lookup or a model that drafts, whichever is expected to gain more."""

import pytest

from tgis.speculation.lookup import Lookup
from tgis.speculation.speculator import Speculator

DRAFTED = 3


def taught(pass_seconds: float, right: int, max_drafting: int = 8) -> tuple[Speculator, Lookup]:
    """Steps take 10 ms and 0.1 more for each row; so many of the drafts' tokens have been right."""
    speculator, lookup = Speculator(7, 16, 1000, DRAFTED, max_drafting), Lookup([*range(50)], 0)
    for _ in range(20):
        for rows in (1, 2, 3, 4, 8):
            speculator.policy.step_succeeded(rows, 0.01 + rows / 10_000)
        speculator.policy.step_succeeded(4, 0.0104 + DRAFTED * pass_seconds, DRAFTED)
        speculator.drafted(lookup, [1, 2, 3], [*[1, 2, 3][:right], 9])
    return speculator, lookup


@pytest.mark.parametrize(
    ("pass_seconds", "right", "asked"),
    [(0.001, 3, 3), (0.001, 1, 1), (0.001, 0, 0), (0.02, 3, 0), (0.0, 2, 2)],
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
    assert (tokens[:5], count) == ([*range(45, 50)], 1)


def test_a_large_step_gets_no_drafts() -> None:
    speculator, lookup = taught(0.001, 3, max_drafting=1)
    assert speculator.propose(2, [(lookup, 100)] * 2) == [[], []]
    assert speculator.propose(1, [(lookup, 100)]) == [3]


def test_drafts_that_were_wrong_are_tried_again() -> None:
    speculator, _ = taught(0.0, 0)
    fresh, tries = Lookup([1], 0), 0
    while speculator.propose(1, [(fresh, 100)]) == [[]]:
        tries += 1
    assert 100 < tries < 10_000
