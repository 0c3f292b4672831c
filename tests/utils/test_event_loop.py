"""tgis.utils.event_loop: every event of gRPC arrives, whatever becomes of others."""

import asyncio
import threading
from collections.abc import Awaitable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc
from tgis.utils.event_loop import EventLoop, run

CALLS = 32


@dataclass
class Server:
    """A server whose calls all end with an event."""

    port: int = 0
    end: threading.Event = field(default_factory=threading.Event)
    begun: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def wait(self, request: bytes, _context: grpc.ServicerContext) -> bytes:
        self.begun.release()
        self.end.wait()
        return request

    async def calls(self) -> list[Awaitable[bytes]]:
        """Once all have begun."""
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{self.port}")
        calls: list[Awaitable[bytes]] = [
            channel.unary_unary("/test.Service/Wait", bytes, bytes)(b"x") for _ in range(CALLS)
        ]
        assert await asyncio.to_thread(lambda: all(self.begun.acquire(timeout=20) for _ in calls))
        return calls


@contextmanager
def serving() -> Iterator[Server]:
    ours = Server()
    methods = {"Wait": grpc.unary_unary_rpc_method_handler(ours.wait)}
    with ThreadPoolExecutor(2 * CALLS) as pool:
        server = grpc.server(pool, [grpc.method_handlers_generic_handler("test.Service", methods)])
        ours.port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield ours
        finally:
            ours.end.set()
            server.stop(None).wait()


def test_events_of_a_closed_loop_delay_no_others() -> None:
    """gRPC has one queue for all loops, and raises an error at each event of a closed one."""
    with serving() as server:

        async def finish() -> list[bytes]:
            calls = await server.calls()
            server.end.set()
            return await asyncio.wait_for(asyncio.gather(*calls), 20)

        closed = EventLoop()
        left = closed.run_until_complete(server.calls())
        closed.close()
        assert run(finish()) == [b"x"] * CALLS
        del left
