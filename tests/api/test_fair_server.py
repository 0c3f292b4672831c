"""Calls of many connections that wait at the same time: which goes first, and how the event loop hears of them."""

import array
import asyncio
import contextlib
import fcntl
import socket
import termios
import time
from collections.abc import Callable, Container, Iterator
from typing import Any

import grpc
import pytest
import uvloop
from harness import run_async
from raw_http2 import HELLO, call_frames
from tgis.api.grpc.fair_server import (
    MAX_ARRIVING_SLOWLY,
    MAX_STARTS,
    MAX_WAIT_SECONDS,
    NUM_ACCEPTS,
    PAUSE,
    ConnectionTurns,
    FairServer,
    Turn,
)
from tgis.api.grpc.open_calls import LARGE_BYTES, OpenCalls

from benchmarks.chaos.http2 import ACK, PING, frame
from tgis.config import Config
from tgis.utils import event_loop

ECHO = "/test.Service/Echo"
CONFIG = Config(model_name="m")
NUM_CALLS = 300  # of a connection
MAX_CALLS = 100  # likewise, where that matters
FLOOD = b"".join(call_frames(ECHO, b"flood", stream) for stream in range(1, 2 * NUM_CALLS, 2))


class Calls:
    """A `grpc.GenericRpcHandler`; remembers the messages in the order in which it has handled them."""

    def __init__(self) -> None:
        self.num_started = 0
        self.messages: list[bytes] = []

    def service(self, _handler_call_details: object) -> "grpc.RpcMethodHandler[bytes, bytes]":
        """What gRPC asks for before it receives the message."""
        self.num_started += 1
        return grpc.unary_unary_rpc_method_handler(self.echo)

    async def echo(self, message: bytes, _context: object) -> bytes:
        self.messages.append(message)
        return message

    async def start_server(self, num_calls: int = 0) -> tuple[FairServer, int]:
        """With its port; it handles none before so many have arrived."""
        handlers: list[Any] = [self]
        server = FairServer(handlers, (), [], OpenCalls(CONFIG))
        server._turns = GatedTurns(num_calls)
        port = server.add_insecure_port(b"127.0.0.1:0")
        await server.start()
        return server, port


class Arriving:
    """A call whose message is on its way."""

    def __init__(self, connection: str) -> None:
        self.connection = connection


class GatedTurns(ConnectionTurns[Any]):
    def __init__(self, num_calls: int) -> None:
        super().__init__(max_calls=NUM_CALLS)
        self.missing = num_calls

    def add(self, connection: str, call: Any, now: float) -> None:
        super().add(connection, call, now)
        self.missing -= 1

    def take(
        self, now: float, busy: Container[str] = (), *, only_new: bool = False, backlog: bool = True
    ) -> Turn[Any] | None:
        return None if self.missing > 0 else super().take(now, busy, only_new=only_new, backlog=backlog)


@contextlib.contextmanager
def client(port: int, calls: bytes) -> Iterator[socket.socket]:
    """Has sent calls that C-core has seen: it answers pings without the event loop, which does not run meanwhile."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(HELLO + calls + frame(PING, 0, 0, bytes(8)))
        read_until(connection, frame(PING, ACK, 0, bytes(8)))
        yield connection


def read_until(connection: socket.socket, expected: bytes) -> None:
    received = b""
    while expected not in received:
        received += connection.recv(1 << 16) or b"closed" * len(expected)
        assert b"closed" not in received


@run_async
async def test_a_call_goes_before_those_that_wait_on_a_busy_connection() -> None:
    calls = Calls()
    server, port = await calls.start_server(2 * NUM_CALLS + 1)
    with client(port, FLOOD), client(port, FLOOD), client(port, call_frames(ECHO, b"one")):
        while len(calls.messages) < 2 * NUM_CALLS + 1:
            await asyncio.sleep(0)
    await server.shutdown(None)
    assert calls.messages.index(b"one") < 20  # third in turn, and last in the order of their arrival


@run_async
async def test_a_server_stops_with_calls_that_wait() -> None:
    calls = Calls()
    server, port = await calls.start_server()
    with client(port, FLOOD):
        while not calls.messages:
            await asyncio.sleep(0)
        await server.shutdown(None)
    assert len(calls.messages) < NUM_CALLS


def unread_bytes(reader: socket.socket) -> int:
    size = array.array("i", [0])
    fcntl.ioctl(reader, termios.FIONREAD, size)
    return size[0]


def test_an_iteration_of_the_event_loop_takes_all_wake_ups_of_grpc(monkeypatch: pytest.MonkeyPatch) -> None:
    add_reader = uvloop.Loop.add_reader
    readers: list[socket.socket] = []
    unread: list[tuple[int, int]] = []  # before and after the loop has been woken

    def add(loop: Any, reader: socket.socket, callback: Callable[[], None]) -> None:
        def woken() -> None:
            before = unread_bytes(reader)
            callback()
            unread.append((before, unread_bytes(reader)))

        readers.append(reader)
        add_reader(loop, reader, woken)

    async def flood() -> None:
        server, port = await Calls().start_server()
        while not server._accepts:
            await asyncio.sleep(0)
        await asyncio.sleep(0)  # each has asked for a call
        deadline = time.monotonic() + 30
        with client(port, FLOOD):  # C-core has matched it with all accepts, while the loop has not run
            while unread_bytes(readers[0]) < NUM_ACCEPTS:
                assert time.monotonic() < deadline
            unread.clear()
            while not unread:
                await asyncio.sleep(0)
        await server.shutdown(None)

    monkeypatch.setattr(uvloop.Loop, "add_reader", add)
    event_loop.run(flood())
    before, after = unread[0]
    assert before >= NUM_ACCEPTS
    assert after == 0


@run_async
async def test_an_iteration_of_the_event_loop_starts_some_calls_of_connections_that_have_none_waiting() -> None:
    server = FairServer([], (), [], OpenCalls(CONFIG))
    for number in range(2 * MAX_STARTS):
        server._turns.add(f"new{number}", number, time.monotonic())
    assert [server._take() for _ in range(MAX_STARTS + 1)] == [*range(MAX_STARTS), None]
    await asyncio.sleep(0)
    assert server._take() == MAX_STARTS


@run_async
async def test_calls_of_a_connection_with_a_backlog_start_in_one_of_some_iterations() -> None:
    server = FairServer([], (), [], OpenCalls(CONFIG))
    for call in range(4):
        server._turns.add("flood", call, time.monotonic())
    assert [server._take(), server._take()] == [0, None]
    await asyncio.sleep(0)
    assert [server._take(), server._take()] == [1, None]
    for iteration in range(1, PAUSE):
        await asyncio.sleep(0)
        connection = f"new{iteration}"
        server._turns.add(connection, connection, time.monotonic())
        assert [server._take(), server._take()] == [connection, None]
    await asyncio.sleep(0)
    assert [server._take(), server._take()] == [2, None]


@run_async
async def test_connections_with_a_backlog_keep_others_waiting_for_one_iteration() -> None:
    server = FairServer([], (), [], OpenCalls(CONFIG))
    for number in range(20):
        for call in range(3):
            server._turns.add(f"flood{number}", f"flood{call}", time.monotonic())
    server._turns.add("other", "first", time.monotonic())
    while server._take() != "first":
        await asyncio.sleep(0)
    server._turns.add("other", "second", time.monotonic())
    calls = []
    for _ in range(3):
        await asyncio.sleep(0)
        calls.append(server._take())
    assert "second" in calls


@run_async
async def test_calls_that_start_may_have_large_messages() -> None:
    calls = OpenCalls(CONFIG)
    server = FairServer([], (), [], calls)
    for connection in ("large0", "large1"):
        server._turns.add(connection, connection, time.monotonic())
        calls.note_size(connection, LARGE_BYTES)
    assert [server._take(), server._take()] == ["large0", None]
    await asyncio.sleep(0)
    assert server._take() is None  # its handler does not run yet
    await asyncio.sleep(0)
    assert server._take() == "large1"


@run_async
async def test_calls_of_many_connections_start_together() -> None:
    calls = Calls()
    server, port = await calls.start_server(MAX_STARTS)
    with contextlib.ExitStack() as clients:
        for _ in range(MAX_STARTS):
            clients.enter_context(client(port, call_frames(ECHO, b"one")))
        while not calls.num_started:
            await asyncio.sleep(0)
        num_started = calls.num_started
    await server.shutdown(None)
    assert num_started == MAX_STARTS


@run_async
async def test_a_connection_is_not_busy_with_what_arrives_slowly() -> None:
    calls, now = OpenCalls(CONFIG), time.monotonic() + 60
    since = {"slow": now - 120} | {f"fast{number}": now for number in range(4)}
    receiving: dict[Any, float] = {Arriving(connection): started for connection, started in since.items()}
    calls.receiving.update(receiving)
    assert sorted(calls.arriving_from()) == ["fast0", "fast1", "fast2", "fast3"]


@run_async
async def test_one_large_message_arrives_at_a_time() -> None:
    calls = OpenCalls(CONFIG)
    server = FairServer([], (), [], calls)
    for connection in ("large0", "large1", "small"):
        server._turns.add(connection, connection, time.monotonic())
        calls.note_size(connection, LARGE_BYTES if connection < "m" else LARGE_BYTES - 1)
    receiving: dict[Any, float] = {Arriving("large0"): time.monotonic() + 60}  # so it never arrives slowly
    calls.receiving.update(receiving)
    assert [server._take(), server._take()] == ["small", None]
    calls.receiving.clear()
    assert server._take() == "large0"
    calls.receiving.update(receiving)
    calls.note_size("large1", 100)
    assert server._take() == "large1"


@run_async
async def test_connections_whose_messages_do_not_arrive_with_their_calls_leave_room_for_others() -> None:
    calls = OpenCalls(CONFIG)
    server = FairServer([], (), [], calls)
    with contextlib.ExitStack() as arriving:
        for number in ("late", *range(MAX_ARRIVING_SLOWLY)):
            for _ in range(2):
                call: Any = Arriving(f"slow {number}")
                arriving.enter_context(calls.arriving(call))
        messages = list(calls.receiving)
        calls.receiving.update(dict.fromkeys([*messages[::2], messages[1]], 0.0))  # one of each is late, or both
        for connection in ("slow late", "other"):
            server._turns.add(connection, connection, time.monotonic())
        assert [server._take(), server._take()] == ["other", None]
    assert not calls.slow_senders
    await asyncio.sleep(0)
    assert server._take() == "slow late"


def test_few_large_senders_are_remembered() -> None:
    calls = OpenCalls(CONFIG)
    for connection in map(str, range(10_000)):
        calls.note_size(connection, LARGE_BYTES)
    assert 100 < len(calls.large_senders) < 1000
    assert "9999" in calls.large_senders


def take(turns: ConnectionTurns[Any], busy: Container[str] = (), *, now: float = 0.0) -> Any:
    turn = turns.take(now, busy)
    assert turn is None or turn.call.startswith(turn.connection)
    return turn and turn.call


def drain(turns: ConnectionTurns[Any], now: float = 0.0) -> list[Any]:
    return list(iter(lambda: take(turns, now=now), None))


def test_connections_take_turns() -> None:
    turns = ConnectionTurns[str](MAX_CALLS)
    for call in ("a1", "a2", "a3", "b1", "b2", "c1"):
        turns.add(call[0], call, 0.0)
    assert drain(turns) == ["a1", "b1", "c1", "a2", "b2", "a3"]


def test_a_connection_without_waiting_calls_goes_first() -> None:
    turns = ConnectionTurns[str](MAX_CALLS)
    for call in ("a1", "a2", "b1", "b2"):
        turns.add(call[0], call, 0.0)
    assert [take(turns), take(turns)] == ["a1", "b1"]
    turns.add("c", "c1", 0.0)
    assert drain(turns) == ["c1", "a2", "b2"]


def test_a_connection_without_a_backlog_is_new_again_only_after_its_turn() -> None:
    turns = ConnectionTurns[str](MAX_CALLS)
    for call in ("a1", "a2", "a3", "b1"):
        turns.add(call[0], call, 0.0)
    assert [take(turns), take(turns)] == ["a1", "b1"]
    turns.add("b", "b2", 0.0)
    turns.add("c", "c1", 0.0)
    assert drain(turns) == ["c1", "a2", "a3", "b2"]


def test_connections_with_a_backlog_may_have_to_wait() -> None:
    turns = ConnectionTurns[str](MAX_CALLS)
    for call in ("a1", "a2", "b1"):
        turns.add(call[0], call, 0.0)
    assert [take(turns), take(turns)] == ["a1", "b1"]
    turns.add("b", "b2", 0.0)
    assert turns.take(0.0, backlog=False) == Turn("b", "b2", backlog=False)
    assert turns.take(0.0, backlog=False) is None
    assert turns.take(0.0) == Turn("a", "a2", backlog=True)


def test_the_oldest_calls_of_a_connection_with_more_than_it_may_have_open_are_dropped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    turns = ConnectionTurns[str](MAX_CALLS)
    for number in range(MAX_CALLS + 2):
        turns.add("a", f"a{number}", 0.0)
    assert drain(turns) == [f"a{number}" for number in range(2, MAX_CALLS + 2)]
    line = f"dropped the oldest call of a connection: {MAX_CALLS} others of it wait"
    assert [record.message for record in caplog.records] == [line] * 2


def test_busy_connections_wait() -> None:
    turns = ConnectionTurns[str](MAX_CALLS)
    for call in ("a1", "a2", "b1", "c1"):
        turns.add(call[0], call, 0.0)
    assert [take(turns, "a"), take(turns, "ac"), take(turns, "ac")] == ["b1", None, None]
    assert drain(turns) == ["c1", "a1", "a2"]


def test_connections_without_calls_keep_no_other_from_its_turn() -> None:
    turns = ConnectionTurns[str](MAX_CALLS)
    for connection in range(200):
        turns.add(str(connection), f"{connection} first", 0.0)
    turns.add("199", "199 second", 0.0)
    assert drain(turns) == [f"{connection} first" for connection in range(200)] + ["199 second"]
    assert not turns


def test_calls_that_have_waited_for_too_long_are_dropped() -> None:
    turns = ConnectionTurns[str](MAX_CALLS)
    for call, since in (("a1", 0.0), ("a2", 1.0), ("a3", 2.0), ("b1", 0.0)):
        turns.add(call[0], call, since)
    assert drain(turns, MAX_WAIT_SECONDS + 1.5) == ["a3"]
