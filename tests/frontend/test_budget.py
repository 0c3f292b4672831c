"""tgis.frontend.budget: what one call, one client and all may hold."""

import pytest
from tgis.frontend.budget import MemoryBudget, details_price

from tgis.errors import InvalidRequest, Overloaded
from tgis.ipc.request import LogprobOptions


def test_a_call_that_never_fits_is_invalid() -> None:
    budget = MemoryBudget(1000, 600)
    with budget.account(b"") as account:
        account.charge(400)
        with pytest.raises(InvalidRequest, match="the call takes 601 bytes of memory, at most 600 allowed"):
            account.charge(201)
        account.charge(200)
        assert budget.held == 600
    assert budget.held == 0


def test_a_client_has_a_share_and_others_the_rest() -> None:
    budget = MemoryBudget(1000, 600)
    with budget.account(b"one") as first, budget.account(b"one") as second, budget.account(b"two") as third:
        first.charge(500)
        with pytest.raises(Overloaded) as caught:
            second.charge(101)
        assert caught.value.reason == "calls of this client hold 500 bytes, at most 600 allowed"
        third.charge(500)
        with pytest.raises(Overloaded) as caught:
            second.charge(1)
        assert caught.value.reason == "calls hold 1000 bytes, at most 1000 allowed"
    assert budget.held == 0


def test_calls_of_nobody_knows_whom_share_only_the_whole() -> None:
    budget = MemoryBudget(1000, 600)
    with budget.account(b"") as first, budget.account(b"") as second:
        first.charge(500)
        second.charge(500)


def test_an_error_gives_everything_back() -> None:
    budget = MemoryBudget(100, 100)

    def call() -> None:
        with budget.account(b"one") as account:
            account.charge(60)
            account.charge(60)

    for _ in range(3):
        with pytest.raises(InvalidRequest, match="120 bytes"):
            call()
    assert budget.held == 0


def test_the_price_of_details_grows_with_the_candidates() -> None:
    assert details_price(4001, LogprobOptions(generated_tokens=True, top_n_tokens=10)) == 0
    plain = details_price(4001, LogprobOptions(input_tokens=True))
    assert details_price(4001, LogprobOptions(input_tokens=True, top_n_tokens=10)) == 11 * plain
