"""tgis.frontend.engine_client: what it asks the engine process, and what becomes of the answers."""

import asyncio
import contextlib

import msgspec
import pytest
from batches import EOS, limits, request
from engine_clients import connected_client, engine_outputs
from harness import run_async

from tgis.batcher.batcher import Batcher
from tgis.errors import Unavailable
from tgis.frontend import engine_client
from tgis.frontend.engine_client import EngineClient
from tgis.ipc.channel import FrameReader, encode_frame
from tgis.ipc.lookups import Acquire, Acquired
from tgis.ipc.messages import BatchState, Cancel, Fatal, FromEngine, GetBatchState

EMPTY = Batcher(limits(), {EOS}).state(0.0, max_seqs=0)
BUSY = msgspec.structs.replace(EMPTY, num_running=3)


async def ask(client: EngineClient) -> asyncio.Task[BatchState]:
    """Ask for the state of the batch, without waiting for the answer."""
    question = asyncio.create_task(client.batch_state())
    await asyncio.sleep(0)
    return question


@run_async
async def test_the_state_of_the_batch_needs_an_engine_that_is_alive() -> None:
    client, transport = connected_client()
    pending = await ask(client)
    assert transport.sent == [GetBatchState()]
    (received,) = FrameReader(FromEngine).feed(encode_frame(BUSY))
    client.handle(received)
    assert await pending == BUSY
    client.process.handle(Fatal("the device is lost"))
    client.process.connection_lost(None)
    with pytest.raises(Unavailable, match="the device is lost"):
        await client.batch_state()


@run_async
async def test_concurrent_questions_share_one_message() -> None:
    client, transport = connected_client()
    questions = [await ask(client) for _ in range(100)]
    assert transport.sent == [GetBatchState()]
    client.handle(EMPTY)
    assert await asyncio.gather(*questions) == [EMPTY] * 100
    again = await ask(client)
    client.handle(BUSY)
    assert await again == BUSY


@run_async
async def test_a_question_times_out_and_is_not_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_client, "BATCH_STATE_TIMEOUT", 0.0)
    client, transport = connected_client()
    for _ in range(3):
        with pytest.raises(Unavailable, match="in a step that has taken 0 s by now, or it hangs"):
            await client.batch_state()
    assert transport.sent == [GetBatchState()]
    client.handle(EMPTY)


@run_async
async def test_the_death_of_the_engine_fails_what_is_open_at_once() -> None:
    client, _ = connected_client()
    question = await ask(client)

    async def acquire() -> None:
        with contextlib.ExitStack() as resources:
            await client.acquire("x", 1e6, resources)

    lookup = asyncio.create_task(acquire())
    (output,) = engine_outputs([request(1)])
    with client.submit([output]):
        await asyncio.sleep(0)
        client.process.connection_lost(None)
        for waiting in (question, lookup, acquire()):
            with pytest.raises(Unavailable, match="the engine process has ended"):
                await waiting
        assert isinstance(output.error, Unavailable)
        assert "the engine process has ended" in str(output.error)
    assert await client.process.died == "the engine process was ended by signal 11"


@run_async
async def test_answers_to_questions_are_not_progress() -> None:
    """An engine process whose steps hang still reads files, in other threads."""
    client, _ = connected_client()
    with client.submit(engine_outputs([request(1)])):
        client.process.watchdog._last_progress -= 500
        pending = await ask(client)
        client.handle(EMPTY)
        await pending
        client.handle(Acquired(1))
        client.handle(Acquired(2))
        assert client.seconds_stalled() >= 500


@run_async
async def test_a_lookup_times_out_and_is_cancelled() -> None:
    client, transport = connected_client()
    with contextlib.ExitStack() as resources:
        assert await client.acquire("x", 0.01, resources) is None
    await asyncio.sleep(0)
    assert transport.sent == [Acquire(1, "x"), Cancel([1])]
    client.handle(Acquired(1))  # late: ignored
