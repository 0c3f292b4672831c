"""How late the event loop runs what is due: every call and probe waits for whatever holds it."""

import asyncio
import time
from collections.abc import Callable

INTERVAL_SECONDS = 0.02


async def watch_event_loop(observe: Callable[[float], object], interval: float = INTERVAL_SECONDS) -> None:
    """Wake up at intervals, and report by how many seconds too late; until cancelled."""
    while True:
        due = time.monotonic() + interval
        await asyncio.sleep(interval)
        observe(time.monotonic() - due)
