"""Thread pools of servers, which must not fail when there is no memory for another thread."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

_START_SECONDS = 10.0


def started_pool(num_threads: int, name: str, initializer: Callable[[], None] | None = None) -> ThreadPoolExecutor:
    """All threads run when it returns, so that no later `submit` has to start one; RuntimeError if they cannot."""
    pool = ThreadPoolExecutor(num_threads, name, initializer)
    together = threading.Barrier(num_threads)  # a thread that waits here takes no other's job
    try:
        started = [pool.submit(together.wait, _START_SECONDS) for _ in range(num_threads)]
    except RuntimeError:
        together.abort()
        raise
    for each in started:
        each.result()
    return pool
