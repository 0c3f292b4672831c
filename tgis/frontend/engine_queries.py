"""Asking the engine what it is doing, for all who want to know: rarely, and without ever waiting for long."""

import asyncio
import time
from collections.abc import Callable

from tgis.errors import Unavailable
from tgis.ipc.snapshot import Snapshot

SNAPSHOT_MAX_AGE = 0.25  # for which an answer serves others too: an engine with work at hand has better to do
SNAPSHOT_TIMEOUT = 5.0


class SnapshotQuery:
    """The newest question to the engine; whoever comes before it is answered waits for the same answer."""

    def __init__(self, send: Callable[[], None]) -> None:
        """`ask` sends the question; the engine answers between two steps."""
        self._send = send
        self._sent_at = 0.0
        self._future: asyncio.Future[Snapshot] | None = None

    async def get(self) -> Snapshot:
        """The answer; Unavailable if it does not come in time, or never."""
        answer = self._current()
        await asyncio.wait([answer], timeout=SNAPSHOT_TIMEOUT)
        if not answer.done():
            seconds = time.monotonic() - self._sent_at
            raise Unavailable(f"the engine is in a step that has taken {seconds:.0f} s by now, or it hangs")
        return answer.result()

    def resolve(self, snapshot: Snapshot) -> None:
        """The engine has answered."""
        assert self._future is not None
        self._future.set_result(snapshot)

    def fail(self, cause: str) -> None:
        """The engine will never answer."""
        if self._future is not None and not self._future.done():
            self._future.set_exception(Unavailable(cause))
            self._future.exception()  # perhaps nobody waits any more

    def _current(self) -> asyncio.Future[Snapshot]:
        now = time.monotonic()
        if self._future is None or (self._future.done() and now - self._sent_at > SNAPSHOT_MAX_AGE):
            self._future, self._sent_at = asyncio.get_running_loop().create_future(), now
            self._send()
        return self._future
