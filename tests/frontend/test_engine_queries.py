"""tgis.frontend.engine_queries: snapshots and adapter lookups, on the front end's side."""

import asyncio
import contextlib
from typing import Any

import msgspec
import pytest
from batches import EOS, limits, request
from harness import run_async

from tgis.batcher.batcher import Batcher
from tgis.errors import Unavailable
from tgis.frontend import engine_queries
from tgis.frontend.engine_client import EngineClient
from tgis.frontend.engine_queries import Lookups, SnapshotQuery
from tgis.ipc.adapters import AdapterResolved, ResolveAdapter
from tgis.ipc.framing import FrameReader, encode_frame
from tgis.ipc.grammars import GrammarCompiled
from tgis.ipc.messages import Cancel, EngineInfo, Fatal, FromEngine, GetSnapshot, Ready, ToEngine

EMPTY = Batcher(limits(), {EOS}).snapshot(0.0, max_seqs=0)
BUSY = msgspec.structs.replace(EMPTY, num_running=3)


class Sent:
    """Counts the messages to an engine."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


@run_async
async def test_concurrent_queries_share_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_queries, "SNAPSHOT_MAX_AGE", 1e9)
    sent = Sent()
    query = SnapshotQuery(sent)
    queries = [asyncio.ensure_future(query.get()) for _ in range(100)]
    await asyncio.sleep(0)
    assert sent.count == 1
    query.resolve(EMPTY)
    assert await asyncio.gather(*queries) == [EMPTY] * 100
    assert await query.get() == EMPTY
    assert sent.count == 1
    monkeypatch.setattr(engine_queries, "SNAPSHOT_MAX_AGE", -1.0)
    again = asyncio.ensure_future(query.get())
    await asyncio.sleep(0)
    assert sent.count == 2
    query.resolve(BUSY)
    assert await again == BUSY


@run_async
async def test_a_query_times_out_and_is_not_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_queries, "SNAPSHOT_TIMEOUT", 0.0)
    sent = Sent()
    query = SnapshotQuery(sent)
    for _ in range(3):
        with pytest.raises(Unavailable, match="in a step that has taken 0 s by now, or it hangs"):
            await query.get()
    assert sent.count == 1
    query.resolve(EMPTY)
    assert await query.get() == EMPTY


@run_async
async def test_the_death_of_the_engine_fails_a_query_at_once() -> None:
    query = SnapshotQuery(Sent())
    pending = asyncio.ensure_future(query.get())
    await asyncio.sleep(0)
    query.fail("it is gone")
    with pytest.raises(Unavailable, match="it is gone"):
        await pending


class FakeTransport:
    """Collects what the client sends; stands in for its transport."""

    def __init__(self) -> None:
        self.sent: list[ToEngine] = []
        self._reader = FrameReader(ToEngine)

    def write(self, data: bytes) -> None:
        self.sent += self._reader.feed(data)


INFO = EngineInfo("fake", "Fake", "none", "none", 257, False, False, 4, 1000, 64)


@run_async
async def test_snapshots_need_an_engine_that_is_ready_and_alive() -> None:
    client, transport = EngineClient(), FakeTransport()
    client._transport = transport  # type: ignore[assignment]
    with pytest.raises(Unavailable, match="still loading"):
        await client.snapshot()
    assert transport.sent == []  # EngineOptions must come first
    client.handle(Ready(INFO))
    pending = asyncio.ensure_future(client.snapshot())
    await asyncio.sleep(0)
    assert transport.sent == [GetSnapshot()]
    (received,) = FrameReader(FromEngine).feed(encode_frame(BUSY))
    client.handle(received)
    assert await pending == BUSY
    client.handle(Fatal("the device is lost"))
    client._dead = True
    with pytest.raises(Unavailable, match="the device is lost"):
        await client.snapshot()


@run_async
async def test_calls_that_end_together_are_cancelled_in_one_message() -> None:
    client, transport = EngineClient(), FakeTransport()
    client._transport = transport  # type: ignore[assignment]
    with contextlib.ExitStack() as calls:
        for number in range(1, 4):
            calls.enter_context(client.submit([request(number)], eager=True, arrived=0.0))
        del transport.sent[:]
    await asyncio.sleep(0)
    assert [sorted(message.ids) for message in transport.sent if isinstance(message, Cancel)] == [[1, 2, 3]]
    with client.submit([request(4)], eager=True, arrived=0.0):
        pass
    await asyncio.sleep(0)
    assert transport.sent[-1] == Cancel([4])


@run_async
async def test_answers_to_queries_are_not_progress() -> None:
    client, transport = EngineClient(), FakeTransport()
    client._transport = transport  # type: ignore[assignment]
    client.handle(Ready(INFO))
    with client.submit([request(1)], eager=True, arrived=0.0):
        client._watchdog._last_progress -= 500
        pending = asyncio.ensure_future(client.snapshot())
        await asyncio.sleep(0)
        client.handle(EMPTY)
        await pending
        assert client.seconds_stalled() >= 500


@run_async
async def test_a_lookup_times_out_and_is_cancelled() -> None:
    sent: list[Any] = []
    cancelled: list[int] = []
    lookups = Lookups(sent.append, cancelled.append)
    async with lookups.acquire(ResolveAdapter(5, "x"), AdapterResolved, timeout=0.01) as info:
        assert info is None
    assert (sent, cancelled) == ([ResolveAdapter(5, "x")], [5])
    lookups.resolve(AdapterResolved(5, length=3))  # late: ignored


@run_async
async def test_answers_to_lookups_are_not_progress() -> None:
    """An engine process whose steps hang still reads files, in other threads."""
    client = EngineClient()
    before = client._watchdog._last_progress
    client.handle(AdapterResolved(1, length=3))
    client.handle(GrammarCompiled(2))
    assert client._watchdog._last_progress == before
