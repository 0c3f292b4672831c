"""WorkPool: jobs of small calls go first, and a cancelled call frees its place when its thread does."""

import asyncio
import gc
import threading
from collections.abc import Iterator
from functools import partial

import pytest
from harness import run_async

from tgis.utils.thread_pool import LARGE, SMALL, WorkPool

MORE = SMALL + 1


@pytest.fixture
def pool() -> Iterator[WorkPool]:
    """A pool of one thread."""
    made = WorkPool(1, "test")
    yield made
    made.close()


@run_async
async def test_smaller_calls_go_first(pool: WorkPool) -> None:
    gate = threading.Event()
    order: list[int] = []
    running: list[asyncio.Task[object]] = [asyncio.create_task(pool.run(MORE, gate.wait))]
    for size in (MORE + 500, MORE + 20, MORE + 300, MORE + 20):
        running.append(asyncio.create_task(pool.run(size, partial(order.append, size))))
        await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(*running)
    assert order == [MORE + 20, MORE + 20, MORE + 300, MORE + 500]


@run_async
async def test_a_call_that_is_cancelled_keeps_its_thread_until_the_job_ends(pool: WorkPool) -> None:
    gate = threading.Event()
    running, waiting = [asyncio.create_task(pool.run(MORE, gate.wait)) for _ in range(2)]
    await asyncio.sleep(0)
    running.cancel()
    waiting.cancel()
    await asyncio.gather(running, waiting, return_exceptions=True)
    last = asyncio.create_task(pool.run(MORE, lambda: "done"))
    await asyncio.sleep(0)
    assert not last.done()
    gate.set()
    assert await last == "done"


@run_async
async def test_a_call_that_is_cancelled_when_its_turn_comes_hands_it_on(pool: WorkPool) -> None:
    gate = threading.Event()
    running, cancelled, last = [asyncio.create_task(pool.run(MORE + size, gate.wait)) for size in range(3)]
    await asyncio.sleep(0)
    pool._waiting[0][2].add_done_callback(lambda _: cancelled.cancel())  # before it can use the thread
    gate.set()
    assert await running
    assert await asyncio.wait_for(last, 10)
    assert cancelled.cancelled()
    assert await pool.run(MORE, lambda: "idle again") == "idle again"


@run_async
async def test_a_thread_that_is_handed_on_is_not_idle(pool: WorkPool) -> None:
    gate = threading.Event()
    order: list[str] = []
    waiting: list[asyncio.Task[object]] = [asyncio.create_task(pool.run(MORE, gate.wait))]
    await asyncio.sleep(0)
    waiting.append(asyncio.create_task(pool.run(MORE, partial(order.append, "first"))))
    await asyncio.sleep(0)
    turn = pool._waiting[0][2]
    turn.add_done_callback(lambda _: waiting.append(asyncio.create_task(pool.run(MORE, partial(order.append, "late")))))
    gate.set()
    await asyncio.gather(*waiting)
    await asyncio.gather(*waiting)
    assert order == ["first", "late"]
    assert pool._num_idle == 1


@run_async
async def test_an_error_of_a_job_is_that_of_its_call(pool: WorkPool) -> None:
    with pytest.raises(ZeroDivisionError):
        await pool.run(MORE, lambda: 1 // 0)
    assert await pool.run(MORE, lambda: 2) == 2


@run_async
async def test_an_error_of_a_cancelled_call_is_nobodys(pool: WorkPool, caplog: pytest.LogCaptureFixture) -> None:
    gate = threading.Event()
    call = asyncio.create_task(pool.run(MORE, lambda: 1 // (not gate.wait())))
    await asyncio.sleep(0)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    gate.set()
    assert await pool.run(MORE, lambda: 2) == 2
    gc.collect()
    assert caplog.messages == []


@run_async
async def test_small_work_runs_at_once(pool: WorkPool) -> None:
    gate = threading.Event()
    busy = asyncio.create_task(pool.run(MORE, gate.wait))
    await asyncio.sleep(0)
    assert await pool.run(SMALL, threading.get_ident) == threading.get_ident()
    gate.set()
    assert await busy


@run_async
async def test_of_large_work_there_is_one_piece_at_a_time() -> None:
    pool, gate = WorkPool(3, "test"), threading.Event()
    started = threading.Semaphore(0)

    def job() -> bool:
        started.release()
        return gate.wait()

    large = [asyncio.create_task(pool.run(LARGE + 1, job)) for _ in range(4)]
    await asyncio.sleep(0)
    for _ in range(2):
        assert await pool.run(LARGE, threading.get_ident) != threading.get_ident()
    assert started.acquire(timeout=10)
    assert not started.acquire(blocking=False)
    gate.set()
    assert await asyncio.gather(*large) == [True] * 4
    pool.close()


@run_async
async def test_a_pool_of_one_thread_does_large_work(pool: WorkPool) -> None:
    assert await pool.run(LARGE + 1, lambda: 1) == 1
