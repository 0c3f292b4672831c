"""Thread pools of servers."""

import asyncio
import heapq
import itertools
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")

SMALL = 250  # microseconds: about what handing work to a thread costs
LARGE = 5_000  # microseconds; of work that takes longer, there is one piece at a time
_START_SECONDS = 10.0
_AWAY_SECONDS = 0.001
_NICENESS = 5  # more than the process has: where cores are few, steps get three times as much of them


def leave_gil(seconds: float = _AWAY_SECONDS) -> None:
    """Sleep, in a thread that mostly runs Python: the event loop would wait for the GIL after each call of gRPC."""
    if threading.current_thread() is not threading.main_thread():  # where the event loop runs, work is small
        time.sleep(seconds)


def lower_priority() -> None:
    """Lower the priority of this thread alone: Linux has one for each."""
    with suppress(OSError):  # some containers forbid it
        os.nice(_NICENESS)


def started_pool(num_threads: int, name: str, initializer: Callable[[], None] | None = None) -> ThreadPoolExecutor:
    """A pool whose threads all run, so that no later `submit` fails for want of memory; RuntimeError if they cannot."""
    pool = ThreadPoolExecutor(num_threads, name, initializer)
    together = threading.Barrier(num_threads)  # a thread that waits here takes no other's job
    list(pool.map(lambda _: together.wait(_START_SECONDS), range(num_threads)))
    return pool


def _retrieve(job: "asyncio.Future[Any]") -> None:
    """Let asyncio know that an error is dealt with: of a call that was cancelled it would be logged."""
    if not job.cancelled():
        job.exception()


class WorkPool:
    """Threads for work that would hold the event loop for long. Work of the smallest call goes first."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._threads = started_pool(num_threads, name)
        self._num_idle = num_threads
        self._large_runs = False
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []  # a heap
        self._arrivals = itertools.count()

    async def run(self, cost: float, job: Callable[[], T]) -> T:
        """Run the job, at once if it is small; `cost` is about how many microseconds its whole call takes."""
        if cost <= SMALL:
            return job()
        await self._turn(cost)
        return await self._start(cost, job)  # in no variable: its error has this frame

    def close(self) -> None:
        """Stop the threads; what waits for one is dropped."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _start(self, cost: float, job: Callable[[], T]) -> asyncio.Future[T]:
        result = asyncio.get_running_loop().run_in_executor(self._threads, job)
        result.add_done_callback(lambda _: self._release(cost))
        result.add_done_callback(_retrieve)
        return asyncio.shield(result)  # the thread is busy until the job ends, whether or not somebody waits

    async def _turn(self, cost: float) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (cost, next(self._arrivals), turn))
        self._start_next()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it has got a thread already
                self._release(cost)
            raise

    def _start_next(self) -> None:
        while self._num_idle and self._waiting:
            cost, _, turn = self._waiting[0]
            if not turn.done() and cost > LARGE and self._large_runs:
                return  # what waits behind it is as large
            heapq.heappop(self._waiting)
            if not turn.done():
                self._num_idle -= 1
                self._large_runs = self._large_runs or cost > LARGE
                turn.set_result(None)

    def _release(self, cost: float) -> None:
        self._num_idle += 1
        self._large_runs = self._large_runs and cost <= LARGE
        self._start_next()
