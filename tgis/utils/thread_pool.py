"""Threads for work that would hold the event loop for long."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

# Handing work to a thread takes 0.1 ms. Work of this size takes 0.1 ms (text to tokenize) to 2 ms (tokens to decode).
INLINE_SIZE = 256


class WorkPool:
    """A bounded thread pool, first come, first served."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._executor = ThreadPoolExecutor(num_threads, name)

    async def run(self, size: int, job: Callable[[], T]) -> T:
        """Run the job inline if its size, in characters, tokens or token details, is small, else in a thread.

        Cancelling drops a queued job; a running one occupies its thread until it ends.
        """
        if size <= INLINE_SIZE:
            return job()
        return await asyncio.get_running_loop().run_in_executor(self._executor, job)

    def close(self) -> None:
        """Drop queued jobs, without waiting for running ones."""
        self._executor.shutdown(wait=False, cancel_futures=True)
