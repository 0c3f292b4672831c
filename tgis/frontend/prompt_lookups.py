"""The front end's lookups in the engine's store: each is open until its call has ended."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from tgis.errors import Unavailable
from tgis.ipc.adapters import LookupPrompt, PromptInfo
from tgis.ipc.messages import Cancel

PATIENCE_SECONDS = 5.0


class PromptLookups:
    """Questions to the engine, which answers between, before or after anything else that it says."""

    def __init__(self, send: Callable[[LookupPrompt | Cancel], None]) -> None:
        self._send = send
        self._open: dict[int, asyncio.Future[PromptInfo]] = {}
        self._ended = False

    @contextlib.asynccontextmanager
    async def found(self, number: int, prompt_id: str) -> AsyncIterator[PromptInfo | None]:
        """What the engine finds by that id, and keeps until the block is left; None if that takes too long."""
        answer = self._open[number] = asyncio.get_running_loop().create_future()
        self._send(LookupPrompt(number, prompt_id))
        try:
            done, _ = await asyncio.wait([answer], timeout=PATIENCE_SECONDS)
            yield answer.result() if done else None
        finally:
            del self._open[number]
            if not self._ended:
                self._send(Cancel([number]))

    def answer(self, info: PromptInfo) -> None:
        """The engine has answered; perhaps nobody waits any more."""
        if (answer := self._open.get(info.number)) and not answer.done():
            answer.set_result(info)

    def end(self, cause: str) -> None:
        """The engine will never answer."""
        self._ended = True
        for answer in self._open.values():
            if not answer.done():
                answer.set_exception(Unavailable(cause))
