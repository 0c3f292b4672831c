"""Threads for work of very different lengths: what is part of the smallest call goes first."""

import asyncio
import heapq
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class TokenizerPool:
    """As many jobs at a time as there are threads; the others wait here, where their order can still change."""

    def __init__(self, workers: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix=name)
        self._idle = workers
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []  # a heap
        self._arrivals = itertools.count()

    async def run(self, call_size: int, job: Callable[[], T]) -> T:
        """Run the job in a thread; `call_size` is that of the whole call."""
        if not self._idle:
            turn = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (call_size, next(self._arrivals), turn))
            await turn
        self._idle -= 1
        result = asyncio.get_running_loop().run_in_executor(self._threads, job)
        result.add_done_callback(lambda _: self._next())
        return await asyncio.shield(result)  # a thread is busy until its job ends, whether or not somebody waits

    def close(self) -> None:
        """Stop the threads; what waits for one is dropped."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _next(self) -> None:
        self._idle += 1
        while self._waiting:
            _, _, turn = heapq.heappop(self._waiting)
            if not turn.done():  # otherwise its call was cancelled
                turn.set_result(None)
                return
