"""Logs the progress of slow work every few seconds."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)

_INTERVAL_SECONDS = 10.0


@contextmanager
def log_progress(message: Callable[[], str]) -> Iterator[None]:
    """While the block runs, log `message()` every 10 seconds from another thread."""
    done = threading.Event()

    def run() -> None:
        while not done.wait(_INTERVAL_SECONDS):
            log.info("  %s", message())

    thread = threading.Thread(target=run, daemon=True, name="progress")
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
