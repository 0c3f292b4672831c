"""The front end's lookups in the engine's store: each is open until its call has ended."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from tgis.errors import Unavailable
from tgis.ipc.adapters import AdapterResolved, ResolveAdapter
from tgis.ipc.messages import Cancel

ADAPTER_TIMEOUT = 5.0


class AdapterQueries:
    """Questions to the engine, which answers between, before or after anything else that it says."""

    def __init__(self, send: Callable[[ResolveAdapter | Cancel], None]) -> None:
        self._send = send
        self._open: dict[int, asyncio.Future[AdapterResolved]] = {}
        self._dead = False

    @contextlib.asynccontextmanager
    async def acquire(self, lookup_id: int, adapter_id: str) -> AsyncIterator[AdapterResolved | None]:
        """What the engine finds by that id, and keeps until the block is left; None if that takes too long."""
        answer = self._open[lookup_id] = asyncio.get_running_loop().create_future()
        self._send(ResolveAdapter(lookup_id, adapter_id))
        try:
            done, _ = await asyncio.wait([answer], timeout=ADAPTER_TIMEOUT)
            yield answer.result() if done else None
        finally:
            del self._open[lookup_id]
            if not self._dead:
                self._send(Cancel([lookup_id]))

    def resolve(self, info: AdapterResolved) -> None:
        """The engine has answered; perhaps nobody waits any more."""
        if (answer := self._open.get(info.lookup_id)) and not answer.done():
            answer.set_result(info)

    def fail(self, cause: str) -> None:
        """The engine will never answer."""
        self._dead = True
        for answer in self._open.values():
            if not answer.done():
                answer.set_exception(Unavailable(cause))
