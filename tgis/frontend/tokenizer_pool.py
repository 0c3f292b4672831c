"""Threads for work of very different lengths: what is part of the smallest call goes first."""

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from tgis.utils.thread_pool import started_pool

T = TypeVar("T")


class SizedTurns:
    """So many at a time; of the others, those of the smallest calls go first."""

    def __init__(self, count: int) -> None:
        self._idle = count
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []  # a heap
        self._arrivals = itertools.count()

    @asynccontextmanager
    async def turn(self, call_size: int) -> AsyncIterator[None]:
        """Until the end of the block."""
        await self.take(call_size)
        try:
            yield
        finally:
            self.release()

    async def take(self, call_size: int) -> None:
        """Wait for a turn, to be released."""
        if self._idle:
            self._idle -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (call_size, next(self._arrivals), turn))
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it has got the turn already
                self.release()
            raise

    def release(self) -> None:
        """Hand it to the next one that still waits."""
        while self._waiting:
            _, _, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
                return
        self._idle += 1


class TokenizerPool:
    """As many jobs at a time as there are threads; the others wait here, where their order can still change."""

    def __init__(self, workers: int, name: str) -> None:
        self._threads = started_pool(workers, name)
        self._turns = SizedTurns(workers)

    async def run(self, call_size: int, job: Callable[[], T]) -> T:
        """Run the job in a thread; `call_size` is that of the whole call."""
        await self._turns.take(call_size)
        return await self._start(job)

    def _start(self, job: Callable[[], T]) -> asyncio.Future[T]:
        result = asyncio.get_running_loop().run_in_executor(self._threads, job)
        result.add_done_callback(lambda _: self._turns.release())
        return asyncio.shield(result)  # a thread is busy until its job ends, whether or not somebody waits

    def close(self) -> None:
        """Stop the threads; what waits for one is dropped."""
        self._threads.shutdown(wait=True, cancel_futures=True)
