"""Questions to the engine process beside the requests: snapshots of the batch, and lookups.

The engine answers between, before or after anything else that it says, or never; nobody waits for long.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

from tgis.errors import Unavailable
from tgis.ipc.adapters import AdapterResolved, ResolveAdapter
from tgis.ipc.grammars import CompileGrammar, GrammarCompiled
from tgis.ipc.snapshot import Snapshot

SNAPSHOT_MAX_AGE = 0.25  # seconds for which one answer serves all who ask: the engine has better things to do
SNAPSHOT_TIMEOUT = 5.0


class SnapshotQuery:
    """The latest request for a snapshot, shared by all who ask before it is answered."""

    def __init__(self, send: Callable[[], None]) -> None:
        self._send = send
        self._sent_at = 0.0
        self._future: asyncio.Future[Snapshot] | None = None

    async def get(self) -> Snapshot:
        """Return a fresh snapshot; Unavailable if none comes in time, or the engine has died."""
        future = self._current()
        await asyncio.wait([future], timeout=SNAPSHOT_TIMEOUT)
        if not future.done():
            seconds = time.monotonic() - self._sent_at
            raise Unavailable(f"the engine is in a step that has taken {seconds:.0f} s by now, or it hangs")
        return future.result()

    def resolve(self, snapshot: Snapshot) -> None:
        assert self._future is not None
        self._future.set_result(snapshot)

    def fail(self, cause: str) -> None:
        """The engine has died."""
        if self._future is not None and not self._future.done():
            self._future.set_exception(Unavailable(cause))
            self._future.exception()  # mark as retrieved: perhaps nobody waits any more

    def _current(self) -> asyncio.Future[Snapshot]:
        now = time.monotonic()
        if self._future is None or (self._future.done() and now - self._sent_at > SNAPSHOT_MAX_AGE):
            self._future, self._sent_at = asyncio.get_running_loop().create_future(), now
            self._send()
        return self._future


Lookup = ResolveAdapter | CompileGrammar
Answer = TypeVar("Answer", AdapterResolved, GrammarCompiled)


class Lookups:
    """Open lookups; the engine process keeps what a lookup has found until it is cancelled."""

    def __init__(self, send: Callable[[Lookup], None], cancel: Callable[[int], None]) -> None:
        self._send, self._cancel = send, cancel
        self._open: dict[int, asyncio.Future[AdapterResolved | GrammarCompiled]] = {}

    @contextlib.asynccontextmanager
    async def acquire(self, lookup: Lookup, answer: type[Answer], timeout: float) -> AsyncIterator[Answer | None]:
        """Look something up and keep it until the block is left; None if that takes too long."""
        lookup_id = lookup.lookup_id
        future = self._open[lookup_id] = asyncio.get_running_loop().create_future()
        self._send(lookup)
        try:
            done, _ = await asyncio.wait([future], timeout=timeout)
            result = future.result() if done else None
            assert result is None or isinstance(result, answer)
            yield result
        finally:
            del self._open[lookup_id]
            self._cancel(lookup_id)

    def resolve(self, answer: AdapterResolved | GrammarCompiled) -> None:
        if (future := self._open.get(answer.lookup_id)) and not future.done():
            future.set_result(answer)

    def fail(self, cause: str) -> None:
        """The engine has died."""
        for future in self._open.values():
            if not future.done():
                future.set_exception(Unavailable(cause))
