"""tgis.frontend.output_queue: when a call is woken, by which of its queues, and what it gets."""

import asyncio

import pytest
from batches import request
from harness import run_async

from tgis.errors import Unavailable
from tgis.frontend.output_queue import Inbox, OutputQueue
from tgis.ipc.request import StopReason, TokenLogprobs

NOT_FINISHED, MAX_TOKENS = StopReason.NOT_FINISHED, StopReason.MAX_TOKENS


def make_inbox(num_requests: int = 1, *, eager: bool = True) -> Inbox:
    return Inbox([request(n) for n in range(num_requests)], eager=eager, arrived=0.0)


async def pending(inbox: Inbox) -> "asyncio.Task[OutputQueue]":
    """A call that already waits."""
    task = asyncio.create_task(inbox.get())
    await asyncio.sleep(0)
    assert not task.done()
    return task


@run_async
async def test_steps_that_nobody_has_taken_are_taken_together() -> None:
    inbox = make_inbox()
    (queue,) = inbox.queues
    queue.put([1, 2], [TokenLogprobs(-1.0), TokenLogprobs(-2.0)], NOT_FINISHED)
    queue.put([3], [TokenLogprobs(-3.0)], MAX_TOKENS)
    assert await inbox.get() is queue
    assert (queue.num_steps, queue.num_tokens, queue.stop_reason, queue.ended) == (2, 3, MAX_TOKENS, True)
    assert queue.take() == ([1, 2, 3], [TokenLogprobs(-float(n)) for n in (1, 2, 3)])
    assert (queue.take(), queue.num_steps, queue.num_tokens) == (([], []), 0, 3)
    await pending(inbox)


@run_async
async def test_an_eager_call_wakes_at_every_step() -> None:
    inbox = make_inbox()
    (queue,) = inbox.queues
    for tokens in ([1], [2, 3]):
        call = await pending(inbox)
        queue.put(tokens, [], NOT_FINISHED)
        assert await call is queue
        assert (queue.num_steps, queue.take()) == (1, (tokens, []))


@run_async
async def test_any_other_call_wakes_at_the_ends() -> None:
    inbox = make_inbox(2, eager=False)
    call = await pending(inbox)
    for queue in inbox.queues:
        queue.put([1], [], NOT_FINISHED)
    await asyncio.sleep(0)
    assert not call.done()
    inbox.queues[1].put([2], [], MAX_TOKENS)
    assert await call is inbox.queues[1]
    assert inbox.queues[1].take() == ([1, 2], [])
    await pending(inbox)


@run_async
async def test_queues_come_in_the_order_in_which_they_got_something() -> None:
    inbox = make_inbox(3)
    for index in (2, 0, 2, 1):
        inbox.queues[index].put([1], [], NOT_FINISHED)
    assert [(await inbox.get()).index for _ in range(3)] == [2, 0, 1]
    await pending(inbox)


@pytest.mark.parametrize("fails", [False, True])
def test_the_end_is_told_once_the_engine_is_done_with_all_requests(fails: bool) -> None:
    @run_async
    async def end() -> None:
        inbox, ends = make_inbox(2), list[list[bool]]()
        inbox.on_end = lambda: ends.append([queue.ended for queue in inbox.queues])
        first, second = inbox.queues
        first.put([1], [], NOT_FINISHED)
        first.put([2], [], MAX_TOKENS)
        assert ends == []
        second.fail(Unavailable("it is gone")) if fails else second.put([], [], MAX_TOKENS)
        assert ends == [[True, True]]

    end()
