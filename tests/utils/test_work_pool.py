"""WorkPool: small jobs run inline, others first come, first served; a cancelled call frees no thread early."""

import asyncio
import threading
from collections.abc import Iterator
from functools import partial

import pytest
from harness import run_async

from tgis.utils.thread_pool import INLINE_SIZE, LARGE_SIZE, WorkPool

LARGE = INLINE_SIZE + 1


@pytest.fixture
def pool() -> Iterator[WorkPool]:
    """A pool of one thread."""
    made = WorkPool(1, "test")
    yield made
    made.close()


@run_async
async def test_first_come_first_served(pool: WorkPool) -> None:
    gate = threading.Event()
    order: list[int] = []
    running: list[asyncio.Task[object]] = [asyncio.create_task(pool.run(LARGE, partial(gate.wait, 20)))]
    for size in (LARGE + 500, LARGE + 20, LARGE + 300):
        running.append(asyncio.create_task(pool.run(size, partial(order.append, size))))
        await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(*running)
    assert order == [LARGE + 500, LARGE + 20, LARGE + 300]


@run_async
async def test_a_cancelled_call_keeps_its_thread_until_the_job_ends(pool: WorkPool) -> None:
    gate, dropped = threading.Event(), threading.Event()
    running = asyncio.create_task(pool.run(LARGE, partial(gate.wait, 20)))
    waiting = asyncio.create_task(pool.run(LARGE, dropped.set))
    await asyncio.sleep(0)
    running.cancel()
    waiting.cancel()
    await asyncio.gather(running, waiting, return_exceptions=True)
    last = asyncio.create_task(pool.run(LARGE, lambda: "done"))
    await asyncio.sleep(0)
    assert not last.done()
    gate.set()
    assert await last == "done"
    assert not dropped.is_set()


@run_async
async def test_small_work_runs_inline(pool: WorkPool) -> None:
    gate = threading.Event()
    busy = asyncio.create_task(pool.run(LARGE, partial(gate.wait, 20)))
    await asyncio.sleep(0)
    assert await pool.run(INLINE_SIZE, threading.get_ident) == threading.get_ident()
    assert await pool.run(LARGE_SIZE, threading.get_ident) != threading.get_ident()  # not behind smaller work
    gate.set()
    assert await busy


@pytest.mark.parametrize("size", [LARGE, LARGE_SIZE])
@run_async
async def test_closing_drops_queued_jobs_and_waits_for_none(pool: WorkPool, size: int) -> None:
    gate, started = threading.Event(), threading.Barrier(2)
    running = asyncio.create_task(pool.run(size, lambda: (started.wait(10), gate.wait())))
    queued = asyncio.create_task(pool.run(size, partial(gate.wait, 20)))
    await asyncio.sleep(0)
    started.wait(10)
    pool.close()
    with pytest.raises(asyncio.CancelledError):
        await queued
    assert not running.done()
    gate.set()
    await running
