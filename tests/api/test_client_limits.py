"""What clients hold and what waits for them: bounded for one client and for all."""

import time
from typing import Any

import pytest
from mounted_secret import Clock

from tgis.api.clients import MAX_UNREAD_BYTES, Account, Clients, Waiting
from tgis.config import Config
from tgis.errors import InvalidRequest, Overloaded, RequestError

MIB = 1 << 20


class Call:
    """Remembers how it was ended."""

    def __init__(self, client: str = "") -> None:
        self.client = client
        self.ends: list[RequestError | None] = []

    def end(self, error: RequestError | None) -> None:
        self.ends.append(error)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    return clock


def make_clients(**options: Any) -> Clients:
    return Clients(Config(model_name="m", **options))


# --- memory ---


def test_a_client_has_half_of_the_memory_and_others_the_rest() -> None:
    clients = make_clients(max_call_memory_mb=2)
    with Account(clients, b"one") as first, Account(clients, b"one") as second, Account(clients, b"two") as third:
        first.charge(MIB - 100)
        with pytest.raises(Overloaded) as caught:
            second.charge(101)
        assert caught.value.reason == f"calls of this client hold {MIB - 100} bytes, at most {MIB} allowed"
        third.charge(MIB)
        second.charge(100)
        with Account(clients, b"three") as fourth, pytest.raises(Overloaded) as caught:
            fourth.charge(1)
        assert caught.value.reason == f"calls hold {2 * MIB} bytes, at most {2 * MIB} allowed"
    assert clients.memory.held == {}


def test_calls_of_nobody_knows_whom_share_only_the_whole() -> None:
    clients = make_clients(max_call_memory_mb=2)
    with Account(clients, b"") as first, Account(clients, b"") as second:
        first.charge(MIB)
        second.charge(MIB)


def test_an_error_gives_everything_back() -> None:
    clients = make_clients(max_call_memory_mb=2)

    def call() -> None:
        with Account(clients, b"one") as account:
            account.take_places(1)
            account.charge(MIB)
            account.charge(MIB)

    for _ in range(3):
        with pytest.raises(InvalidRequest, match=f"{2 * MIB} bytes"):
            call()
    assert (clients.memory.held, clients.inputs.held) == ({}, {})


# --- places ---


def holding(clients: Clients, num_inputs: int, client: bytes = b"") -> Account:
    account = Account(clients, client)
    account.take_places(num_inputs)
    return account


def test_a_complete_output_needs_no_place_unless_too_much_is_unread() -> None:
    clients = make_clients(max_concurrent_requests=10)
    first, second, third = (holding(clients, 1) for _ in range(3))
    first.output_complete(MAX_UNREAD_BYTES - 10)
    second.output_complete(11)
    third.output_complete(10)
    assert (clients.inputs.held.total(), clients.unread_bytes) == (1, MAX_UNREAD_BYTES)
    first.__exit__()
    second.__exit__()
    assert (clients.inputs.held.total(), clients.unread_bytes) == (0, 10)
    third.__exit__()
    assert (clients.inputs.held.total(), clients.unread_bytes) == (0, 0)


# --- what waits ---


@pytest.mark.parametrize(("limit", "ended"), [(7, []), (6, [1]), (5, [1, 2]), (4, [1, 2, 3]), (3, [1, 2, 3, 4])])
def test_of_too_many_the_client_with_most_loses_its_oldest(clock: Clock, limit: int, ended: list[int]) -> None:
    waiting = Waiting("late", 100, "too many wait", limit, crowd_seconds=0.5)
    calls = [Call(client) for client in "abbbcbc"]
    for call in calls:
        waiting.add(call)
    waiting.sweep()
    assert not any(call.ends for call in calls)  # they have only just begun to wait
    clock.now += 0.5
    waiting.sweep()
    assert [index for index, call in enumerate(calls) if call.ends] == ended
    for index in ended:
        (error,) = calls[index].ends
        assert isinstance(error, Overloaded)
        assert error.reason == "too many wait"


# --- the end of the server ---


@pytest.mark.parametrize("kind", ["connecting", "sending", "reading", "idle"])
def test_what_is_forgotten_waits_no_more(kind: str) -> None:
    clients, call = make_clients(), Call()
    waiting: Waiting = getattr(clients, kind)
    waiting.add(call)
    clients.forget(call)
    assert call not in waiting
