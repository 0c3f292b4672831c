"""Threads for work that would hold the event loop for long."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

# Handing work to a thread takes 0.1 ms. Work of this size takes 0.1 ms (text to tokenize) to 2 ms (tokens to decode).
INLINE_SIZE = 256
# Larger work takes seconds, and up to 250 bytes of memory for each character.
LARGE_SIZE = 1 << 18


class WorkPool:
    """Bounded thread pools, first come, first served; one thread for large work, so that the rest need not wait."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._executor = ThreadPoolExecutor(num_threads, name)
        self._large_executor = ThreadPoolExecutor(1, f"{name}-large")

    async def run(self, size: int, job: Callable[[], T]) -> T:
        """Run the job inline if its size, in characters, tokens or token details, is small, else in a thread.

        Cancelling drops a queued job; a running one occupies its thread until it ends.
        """
        if size <= INLINE_SIZE:
            return job()
        executor = self._executor if size < LARGE_SIZE else self._large_executor
        return await asyncio.get_running_loop().run_in_executor(executor, job)

    def close(self) -> None:
        """Drop queued jobs, without waiting for running ones."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._large_executor.shutdown(wait=False, cancel_futures=True)
