"""tgis.frontend.permits: how many inputs have one, and what does not need one any more."""

import pytest
from tgis.frontend.permits import MAX_UNREAD_BYTES, Permits

from tgis.errors import Overloaded


def test_there_are_so_many() -> None:
    permits = Permits(3, per_client=3)
    two = permits.take(2)
    with pytest.raises(Overloaded) as caught:
        permits.take(2)
    assert caught.value.reason == "2 inputs in flight, at most 3 allowed"
    one = permits.take(1)
    two.give_back()
    permits.take(2)
    one.give_back()
    one.give_back()
    assert permits.num_taken == 2


def test_a_complete_output_needs_none_unless_too_much_is_unread() -> None:
    permits = Permits(10, per_client=10)
    first, second, third = (permits.take(1) for _ in range(3))
    first.output_complete(MAX_UNREAD_BYTES - 10)
    second.output_complete(11)
    third.output_complete(10)
    assert (permits.num_taken, permits.unread_bytes) == (1, MAX_UNREAD_BYTES)
    first.give_back()
    second.give_back()
    assert (permits.num_taken, permits.unread_bytes) == (0, 10)
    third.give_back()
    assert (permits.num_taken, permits.unread_bytes) == (0, 0)


def test_a_client_may_have_fewer() -> None:
    permits = Permits(5, per_client=2)
    assert (permits.most_of_a_call(b"one"), permits.most_of_a_call(b"")) == (2, 5)
    first = permits.take(2, b"one")
    with pytest.raises(Overloaded) as caught:
        permits.take(1, b"one")
    assert caught.value.reason == "2 inputs of this client in flight, at most 2 allowed"
    permits.take(1, b"two")
    permits.take(2)  # of nobody knows whom
    first.output_complete(0)
    first.give_back()
    permits.take(1, b"one")
    with pytest.raises(Overloaded, match="overloaded"):
        permits.take(2, b"three")
