"""tgis.api.grpc.private: turns between connections, and servers that do without."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from grpc._cython import cygrpc  # type: ignore[attr-defined]  # has no stubs
from grpc_calls import CONFIG, connected, echo, make_calls, service
from raw_http2 import HELLO, call_frames

from benchmarks.chaos.http2 import ACK, PING, frame
from tgis.api.grpc import private
from tgis.api.grpc.fair_queue import FairQueue
from tgis.api.grpc.private import run


class Queue(FairQueue):
    def __init__(self) -> None:
        super().__init__(100)
        self.num_added = 0

    def add(self, connection: str, call: Any) -> None:
        self.num_added += 1
        super().add(connection, call)


async def call_works(queue: FairQueue) -> bool:
    """Whether a server with this queue answers."""
    server = private.make_server([service(Echo=echo)], [], queue)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with connected(port) as channel:
        answer: bytes = await channel.unary_unary("/test.Service/Echo", bytes, bytes)(b"x", timeout=20)
    await server.stop(0)
    return answer == b"x"


@pytest.mark.parametrize("name", ["AioServer", "_ServicerContext", "_RequestCallError"])
def test_without_a_private_name_calls_start_in_the_order_of_their_arrival(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    class Names:
        def __getattr__(self, wanted: str) -> Any:
            if wanted == name:
                raise AttributeError(wanted)
            return getattr(cygrpc, wanted)

    monkeypatch.setattr(private, "cygrpc", Names())
    queue = Queue()
    assert run(call_works(queue))
    assert queue.num_added == 0
    line = f"grpcio {grpc.__version__} has changed: calls start in the order of their arrival"
    assert caplog.messages == [line]


def test_a_call_that_cannot_be_queued_stops_no_other(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Queue):
        def add(self, connection: str, call: Any) -> None:
            super().add(connection, call)
            if self.num_added == 1:
                raise RuntimeError("once")

    queue = Broken()
    assert run(call_works(queue))
    assert caplog.messages == ["one call fewer at a time is taken from C-core"]


def test_calls_go_through_the_queue(caplog: pytest.LogCaptureFixture) -> None:
    queue = Queue()
    assert run(call_works(queue))
    assert queue.num_added == 1
    assert caplog.messages == []


ECHO = "/test.Service/Echo"
NUM_CALLS = 300  # of a connection
FLOOD = b"".join(call_frames(ECHO, b"flood", stream) for stream in range(1, 2 * NUM_CALLS, 2))


@contextmanager
def client(port: int, calls: bytes) -> Iterator[socket.socket]:
    """Has sent calls that C-core has seen: it answers pings without the event loop, which does not run meanwhile."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(HELLO + calls + frame(PING, 0, 0, bytes(8)))
        received = b""
        while frame(PING, ACK, 0, bytes(8)) not in received:
            received += connection.recv(1 << 16)
        yield connection


def test_a_call_goes_before_those_that_wait_on_a_busy_connection() -> None:
    messages: list[bytes] = []

    async def serve() -> None:
        calls = make_calls(CONFIG)

        async def remember(data: bytes, _context: object) -> bytes:
            messages.append(data)
            return data

        handler = grpc.method_handlers_generic_handler("test.Service", {"Echo": calls.handler("Echo", remember)})
        server = private.make_server([handler], [], calls.queue)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        with client(port, FLOOD), client(port, FLOOD), client(port, call_frames(ECHO, b"one")):
            while b"one" not in messages:
                await asyncio.sleep(0)
        await server.stop(0)

    run(serve())
    assert len(messages) < NUM_CALLS  # in the order of arrival it would be the last of all
