"""Asking the engine what it is doing, for all who want to know: rarely, and without ever waiting for long."""

import asyncio
import time
from collections.abc import Callable

from tgis.errors import Unavailable
from tgis.ipc.snapshot import Snapshot

FRESH_SECONDS = 0.25  # for which an answer serves others too: an engine with work at hand has better to do
PATIENCE_SECONDS = 5.0


class Inspection:
    """The newest question to the engine; whoever comes before it is answered waits for the same answer."""

    def __init__(self, ask: Callable[[], None]) -> None:
        """`ask` sends the question; the engine answers between two steps."""
        self._ask = ask
        self._asked = 0.0
        self._answer: asyncio.Future[Snapshot] | None = None

    async def snapshot(self) -> Snapshot:
        """The answer; Unavailable if it does not come in time, or never."""
        answer = self._newest()
        await asyncio.wait([answer], timeout=PATIENCE_SECONDS)
        if not answer.done():
            seconds = time.monotonic() - self._asked
            raise Unavailable(f"the engine is in a step that has taken {seconds:.0f} s by now, or it hangs")
        return answer.result()

    def answer(self, snapshot: Snapshot) -> None:
        """The engine has answered."""
        assert self._answer is not None
        self._answer.set_result(snapshot)

    def end(self, cause: str) -> None:
        """The engine will never answer."""
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(Unavailable(cause))
            self._answer.exception()  # perhaps nobody waits any more

    def _newest(self) -> asyncio.Future[Snapshot]:
        now = time.monotonic()
        if self._answer is None or (self._answer.done() and now - self._asked > FRESH_SECONDS):
            self._answer, self._asked = asyncio.get_running_loop().create_future(), now
            self._ask()
        return self._answer
