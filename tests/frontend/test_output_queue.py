"""tgis.frontend.output_queue: who is woken when, and what they get."""

import asyncio

import pytest
from batches import request
from harness import run_async

from tgis.errors import Unavailable
from tgis.frontend.output_queue import OutputQueue
from tgis.ipc.request import StopReason, TokenLogprobs

NOT_FINISHED, MAX_TOKENS = StopReason.NOT_FINISHED, StopReason.MAX_TOKENS


async def pending(queue: OutputQueue) -> "asyncio.Task[None]":
    """A consumer that already waits."""
    task = asyncio.create_task(queue.ready())
    await asyncio.sleep(0)
    assert not task.done()
    return task


@run_async
async def test_steps_that_nobody_has_taken_are_taken_together() -> None:
    queue = OutputQueue(request(1), eager=True, arrived=0.0)
    queue.put([1, 2], [TokenLogprobs(-1.0), TokenLogprobs(-2.0)], NOT_FINISHED)
    queue.put([3], [TokenLogprobs(-3.0)], MAX_TOKENS)
    await queue.ready()
    assert (queue.num_steps, queue.num_tokens, queue.stop_reason, queue.ended) == (2, 3, MAX_TOKENS, True)
    assert queue.take() == ([1, 2, 3], [TokenLogprobs(-float(n)) for n in (1, 2, 3)])
    assert (queue.take(), queue.num_steps, queue.num_tokens) == (([], []), 0, 3)


@run_async
async def test_an_eager_consumer_wakes_at_every_step() -> None:
    queue = OutputQueue(request(1), eager=True, arrived=0.0)
    for tokens in ([1], [2, 3]):
        consumer = await pending(queue)
        queue.put(tokens, [], NOT_FINISHED)
        await consumer
        assert queue.num_steps == 1
        assert queue.take() == (tokens, [])


@run_async
async def test_a_step_before_an_eager_consumer_waits_is_not_missed() -> None:
    queue = OutputQueue(request(1), eager=True, arrived=0.0)
    queue.put([1], [], NOT_FINISHED)
    await queue.ready()
    assert queue.take() == ([1], [])
    await pending(queue)


@run_async
async def test_any_other_consumer_wakes_at_the_end() -> None:
    queue = OutputQueue(request(1), eager=False, arrived=0.0)
    consumer = await pending(queue)
    queue.put([1], [], NOT_FINISHED)
    await asyncio.sleep(0)
    assert not consumer.done()
    queue.put([2], [], MAX_TOKENS)
    await consumer
    assert queue.take() == ([1, 2], [])


@pytest.mark.parametrize("eager", [False, True])
def test_an_error_is_raised_after_the_tokens_before_it(eager: bool) -> None:
    @run_async
    async def fail() -> None:
        queue = OutputQueue(request(1), eager=eager, arrived=0.0)
        queue.put([1], [], NOT_FINISHED)
        queue.fail(Unavailable("it is gone"))
        assert (queue.failed, queue.ended) == (Unavailable, True)
        await queue.ready()
        assert queue.take() == ([1], [])
        for _ in range(2):
            with pytest.raises(Unavailable, match="it is gone"):
                await queue.ready()

    fail()


@run_async
async def test_the_end_is_told_once_the_engine_is_done() -> None:
    for fails in (False, True):
        queue, ends = OutputQueue(request(1), eager=True, arrived=0.0), list[bool]()
        queue.on_end = lambda queue=queue, ends=ends: ends.append(queue.ended)
        queue.put([1], [], NOT_FINISHED)
        assert ends == []
        queue.fail(Unavailable("it is gone")) if fails else queue.put([2], [], MAX_TOKENS)
        assert ends == [True]
