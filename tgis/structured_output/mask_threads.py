"""Makes the masks that may take long beside the steps: who waits for one stays out of them.

Nobody but their own output waits for them, for longer than it takes a quick one to be made.
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait

from tgis.structured_output.compiler import lower_priority
from tgis.structured_output.matcher import GrammarMatcher
from tgis.utils.thread_pool import started_pool

_THREADS = 2  # of each kind
_PATIENCE = 0.003  # of a step, for masks that are probably quick
_MAX_WAIT = 0.01  # until messages are read again


class MaskThreads:
    """Threads of less priority than steps; the masks of outputs whose last one was quick do not wait behind others."""

    def __init__(self) -> None:
        self._slow = started_pool(_THREADS, "slow masks", lower_priority)
        self._quick = started_pool(_THREADS, "quick masks", lower_priority)
        self._open: set[Future[None]] = set()

    def prepare(self, outputs: Iterable[tuple[GrammarMatcher, Sequence[int]]]) -> None:
        """Begin with the masks after these tokens, and wait for a moment for those that are probably quick."""
        quick, others = set(), set()
        for matcher, tokens in outputs:
            if matcher.in_thread and matcher.quick:
                quick.add(matcher.prepare(tokens, self._quick))
            elif matcher.in_thread:
                others.add(matcher.prepare(tokens, self._slow))
        if quick:
            wait(quick, _PATIENCE)
        self._open = {future for future in self._open | quick | others if not future.done()}

    def wait(self) -> None:
        """Wait until one more mask is ready, but not for long."""
        wait(self._open, _MAX_WAIT, FIRST_COMPLETED)
        self._open = {future for future in self._open if not future.done()}

    def close(self) -> None:
        """Drop the masks that no thread has begun with; the process ends when the others are made."""
        for pool in (self._slow, self._quick):
            pool.shutdown(wait=False, cancel_futures=True)
