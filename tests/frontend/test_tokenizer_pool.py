"""Jobs of small calls go before those of large ones; a cancelled call frees its place when its thread does."""

import asyncio
import threading
from functools import partial

from harness import run_async
from tgis.frontend.tokenizer_pool import TokenizerPool


@run_async
async def test_smaller_calls_go_first() -> None:
    pool, gate = TokenizerPool(1, "test"), threading.Event()
    order: list[int] = []
    running: list[asyncio.Task[object]] = [asyncio.create_task(pool.run(0, gate.wait))]
    for size in (500, 20, 300, 20):
        running.append(asyncio.create_task(pool.run(size, partial(order.append, size))))
        await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(*running)
    assert order == [20, 20, 300, 500]
    pool.close()


@run_async
async def test_a_call_that_is_cancelled_keeps_its_thread_until_the_job_ends() -> None:
    pool, gate = TokenizerPool(1, "test"), threading.Event()
    running, waiting = [asyncio.create_task(pool.run(1, gate.wait)) for _ in range(2)]
    await asyncio.sleep(0)
    running.cancel()
    waiting.cancel()
    await asyncio.gather(running, waiting, return_exceptions=True)
    last = asyncio.create_task(pool.run(1, lambda: "done"))
    await asyncio.sleep(0)
    assert not last.done()
    gate.set()
    assert await last == "done"
    pool.close()


@run_async
async def test_a_call_that_is_cancelled_when_its_turn_comes_hands_it_on() -> None:
    pool, gate = TokenizerPool(1, "test"), threading.Event()
    running, cancelled, last = [asyncio.create_task(pool.run(size, gate.wait)) for size in range(3)]
    await asyncio.sleep(0)
    pool._turns._waiting[0][2].add_done_callback(lambda _: cancelled.cancel())  # before it can use the thread
    gate.set()
    assert await running
    assert await asyncio.wait_for(last, 10)
    assert cancelled.cancelled()
    assert await pool.run(0, lambda: "idle again") == "idle again"
    pool.close()


@run_async
async def test_a_thread_that_is_handed_on_is_not_idle() -> None:
    pool, gate = TokenizerPool(1, "test"), threading.Event()
    order: list[str] = []
    waiting: list[asyncio.Task[object]] = [asyncio.create_task(pool.run(1, gate.wait))]
    await asyncio.sleep(0)
    waiting.append(asyncio.create_task(pool.run(1, partial(order.append, "first"))))
    await asyncio.sleep(0)
    turn = pool._turns._waiting[0][2]
    turn.add_done_callback(lambda _: waiting.append(asyncio.create_task(pool.run(0, partial(order.append, "late")))))
    gate.set()
    await asyncio.gather(*waiting)
    await asyncio.gather(*waiting)
    assert order == ["first", "late"]
    assert pool._turns._idle == 1
    pool.close()


@run_async
async def test_an_error_of_a_job_is_that_of_its_call() -> None:
    pool = TokenizerPool(1, "test")
    try:
        await pool.run(1, lambda: 1 // 0)
    except ZeroDivisionError:
        assert await pool.run(1, lambda: 2) == 2
    else:
        raise AssertionError
    pool.close()
