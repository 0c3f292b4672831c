"""tgis.frontend.engine_client: what it asks the engine process, and what becomes of the answers."""

import asyncio
import contextlib
import time

import msgspec
import pytest
from batches import EOS, limits, request
from engine_clients import INFO, connected_client, engine_outputs
from harness import run_async
from scraped_metrics import make_metrics, value

from tgis.batcher.batcher import Batcher
from tgis.errors import Unavailable
from tgis.frontend import engine_client
from tgis.frontend.engine_client import EngineClient
from tgis.ipc.channel import FrameReader, encode_frame
from tgis.ipc.lookups import Acquire, Acquired
from tgis.ipc.messages import (
    BatchState,
    Cancel,
    Failed,
    FailureKind,
    Fatal,
    FromEngine,
    GetBatchState,
    Heartbeat,
    PromptLogprobs,
    Step,
    StepStats,
    Submit,
)
from tgis.ipc.request import StopReason

EMPTY = Batcher(limits(), {EOS}).state(0.0, max_seqs=0)
BUSY = msgspec.structs.replace(EMPTY, num_running=3)


async def ask(client: EngineClient) -> asyncio.Task[BatchState]:
    """Ask for the state of the batch, without waiting for the answer."""
    question = asyncio.create_task(client.batch_state())
    await asyncio.sleep(0)
    return question


@run_async
async def test_the_state_of_the_batch_is_asked_for_once_and_needs_an_engine_that_is_alive() -> None:
    client, transport = connected_client()
    for resident, state in enumerate((BUSY, EMPTY)):
        client.process.handle(Heartbeat(0, resident_cache_bytes=resident))
        transport.sent.clear()
        questions = [await ask(client) for _ in range(100)]
        assert transport.sent == [GetBatchState()]
        client.handle(*FrameReader(FromEngine).feed(encode_frame(state)))
        state = msgspec.structs.replace(state, kv_cache_bytes=INFO.kv_cache_bytes, resident_cache_bytes=resident)
        assert await asyncio.gather(*questions) == [state] * 100
    client.process.handle(Fatal("the device is lost"))
    client.process.connection_lost(None)
    with pytest.raises(Unavailable, match="the device is lost"):
        await client.batch_state()
    with pytest.raises(Unavailable, match="the device is lost"):
        client.flush_cache()


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
    client, transport = connected_client()
    question = await ask(client)

    async def acquire() -> None:
        with contextlib.ExitStack() as resources:
            await client.acquire("x", 1e6, resources)

    lookup = asyncio.create_task(acquire())
    (output,) = engine_outputs([request(1)])
    with client.submit([output]), contextlib.ExitStack() as resources:
        answered = asyncio.create_task(client.acquire("y", 1e6, resources))
        await asyncio.sleep(0)
        client.handle(Acquired(2))
        assert await answered == Acquired(2)
        client.process.connection_lost(None)
        for waiting in (question, lookup, acquire()):
            with pytest.raises(Unavailable, match="the engine process has ended"):
                await waiting
        assert isinstance(output.error, Unavailable)
        assert "the engine process has ended" in str(output.error)
    assert await client.process.died == "the engine process was ended by signal 11"
    assert [type(message) for message in transport.sent] == [GetBatchState, Submit, Acquire, Acquire]  # no Cancel


@run_async
async def test_answers_to_questions_are_not_progress() -> None:
    """An engine process whose steps hang still reads files, in other threads. More requests are none, either."""
    client, _ = connected_client(metrics := make_metrics())
    details, outputs = [PromptLogprobs(1, 1, part) for part in (b"a", b"b")], engine_outputs([request(1)])
    failed = Failed([], FailureKind.ERROR, "", prefill=False)
    steps: list[FromEngine] = [Step([], [], [], [], None), *details, failed]
    client.process.watchdog._last_progress -= 500
    with client.submit(outputs):
        assert client.seconds_stalled() < 500
        for progress in steps:
            client.process.watchdog._last_progress -= 500
            pending = await ask(client)
            client.handle(EMPTY)
            await pending
            client.handle(Acquired(1))
            with client.submit(engine_outputs([request(2)])):
                assert client.seconds_stalled() >= 500
            client.handle(progress)
            assert client.seconds_stalled() < 500
    assert outputs[0].prompt_logprobs == details
    assert value(metrics, "tgi_batch_inference_failure", method="next_token", reason="error") == 1


@run_async
async def test_a_lookup_times_out_and_is_cancelled() -> None:
    client, transport = connected_client()
    with contextlib.ExitStack() as resources:
        assert await client.acquire("x", 0.01, resources) is None
    await asyncio.sleep(0)
    assert transport.sent == [Acquire(1, "x"), Cancel([1])]
    client.handle(Acquired(1))  # late: ignored


def step_of(
    tokens: dict[int, list[int]], end: StopReason = StopReason.NOT_FINISHED, *scheduled: int, back: int = 0
) -> Step:
    """A step that schedules some requests for the first time, and sends others back into the queue."""
    stats = StepStats(True, 2, 0, 9, 0.1, 0.1, 2, 9, 9, False, back, dict.fromkeys(scheduled, (0.1, 0)))
    return Step([*tokens], [*tokens.values()], [end] * len(tokens), [], stats)


@run_async
async def test_queue_size_follows_arrivals_cancels_schedules_and_ends() -> None:
    metrics = make_metrics()
    client, _ = connected_client(metrics)
    outputs = engine_outputs([request(n, 10 + n) for n in range(5)])

    def queue() -> tuple[float, list[int]]:
        metrics.set_num_queued(len(client.queued()))
        return value(metrics, "tgi_queue_size"), [request.id for request in client.queued()]

    with client.submit(outputs):
        assert queue() == (5, [0, 1, 2, 3, 4])
        client.cancel(outputs[4])
        client.handle(step_of({0: [7], 1: [7]}, StopReason.NOT_FINISHED, 0, 1))
        assert queue() == (2, [2, 3])
        client.handle(Step([2], [[]], [StopReason.TIME_LIMIT], [], None))
        assert queue() == (1, [3])
        client.handle(step_of({0: [7], 1: [7]}, back=1))
        assert queue() == (2, [3])
    client.handle(step_of({0: [7], 1: [7]}, back=1))  # the step was in flight
    assert queue() == (0, [])


@run_async
async def test_tokens_are_counted_when_they_come_whatever_becomes_of_the_request() -> None:
    metrics = make_metrics()
    client, _ = connected_client(metrics)
    names = ["tgi_batch_generated_tokens", "tgi_batch_discarded_tokens"]
    names += [f"tgi_request_{name}_duration_count" for name in ("inter_token_latency", "time_to_first_token")]
    outputs = engine_outputs([request(n) for n in range(3)], time.monotonic() - 500)

    def counts(step: Step) -> list[float]:
        client.handle(step)
        return [value(metrics, name) for name in names]

    with client.submit(outputs):
        assert counts(step_of({0: [7], 1: [7]})) == [2, 0, 0, 2]
        outputs[1].timings.first_token -= 500
        assert counts(step_of({0: [7, 7], 1: [7]})) == [5, 0, 2, 2]  # between two tokens of one step is no time
        client.cancel(outputs[0])
        assert counts(step_of({0: [7, 7], 1: [7]})) == [8, 2, 3, 2]
        assert counts(step_of({1: [], 2: []}, StopReason.TIME_LIMIT)) == [8, 2, 3, 2]  # one expired in the queue
        assert [output.num_tokens for output in outputs] == [3, 3, 0]
    assert outputs[1].timings.last_token - outputs[1].timings.first_token > 500
    assert value(metrics, "tgi_request_inter_token_latency_duration_sum") < 60
    assert value(metrics, "tgi_request_time_to_first_token_duration_sum") == pytest.approx(2 * 500, abs=60)
