"""Several coroutines of one call at a time."""

import asyncio
from collections.abc import Coroutine, Sequence


async def run_together(work: Sequence[Coroutine[None, None, None]]) -> None:
    """Until all have ended, or one has failed, which cancels the others."""
    if len(work) == 1:
        await work[0]
        return
    tasks = [asyncio.create_task(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        while tasks:  # they keep their errors, whose tracebacks have this frame
            tasks.pop().cancel()
