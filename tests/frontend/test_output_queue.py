"""tgis.frontend.output_queue: who is woken when, and what they get."""

import asyncio

import pytest
from batches import request
from harness import run_async

from tgis.errors import Unavailable
from tgis.frontend.output_queue import NewTokens, OutputQueue
from tgis.ipc.request import StopReason, TokenLogprobs

NOT_FINISHED, MAX_TOKENS = StopReason.NOT_FINISHED, StopReason.MAX_TOKENS


async def pending(queue: OutputQueue) -> "asyncio.Task[NewTokens]":
    """A consumer that already waits."""
    task = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    return task


@run_async
async def test_steps_that_nobody_has_taken_are_merged() -> None:
    queue = OutputQueue(request(1), eager=True, arrived=0.0)
    queue.put([1, 2], [TokenLogprobs(-1.0), TokenLogprobs(-2.0)], NOT_FINISHED)
    queue.put([3], [TokenLogprobs(-3.0)], MAX_TOKENS)
    logprobs = [TokenLogprobs(-float(n)) for n in (1, 2, 3)]
    assert await queue.get() == NewTokens([1, 2, 3], logprobs, MAX_TOKENS, merged=True)


@run_async
async def test_an_eager_consumer_wakes_at_every_step() -> None:
    queue = OutputQueue(request(1), eager=True, arrived=0.0)
    for tokens in ([1], [2, 3]):
        consumer = await pending(queue)
        queue.put(tokens, [], NOT_FINISHED)
        assert await consumer == NewTokens(tokens, merged=False)


@run_async
async def test_any_other_consumer_wakes_at_the_end() -> None:
    queue = OutputQueue(request(1), eager=False, arrived=0.0)
    consumer = await pending(queue)
    queue.put([1], [], NOT_FINISHED)
    await asyncio.sleep(0)
    assert not consumer.done()
    queue.put([2], [], MAX_TOKENS)
    assert await consumer == NewTokens([1, 2], [], MAX_TOKENS, merged=True)


@pytest.mark.parametrize("eager", [False, True])
def test_an_error_is_raised_after_the_tokens_before_it(eager: bool) -> None:
    @run_async
    async def fail() -> None:
        queue = OutputQueue(request(1), eager=eager, arrived=0.0)
        queue.put([1], [], NOT_FINISHED)
        queue.fail(Unavailable("it is gone"))
        assert queue.failed
        assert await queue.get() == NewTokens([1])
        for _ in range(2):
            with pytest.raises(Unavailable, match="it is gone"):
                await queue.get()

    fail()
