"""Long work on the event loop in slices, so that nothing else waits for the whole of it."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from itertools import islice
from typing import TypeVar

T = TypeVar("T")

SLICE = 512  # units of work, of some microseconds each


class Slicer:
    """Shared by all long work of a loop: an iteration of the loop does one slice, whoever waits for one."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()  # first come, first served
        self._done = 0  # units in this iteration of the loop

    async def slices(self, items: Iterable[T], cost: int = 1) -> AsyncIterator[list[T]]:
        """The items in lists; each item takes `cost` units of work, by the iterator or by the caller."""
        rest = iter(items)
        while True:
            await self.turn(0)
            part = list(islice(rest, max((SLICE - self._done) // cost, 1)))
            if not part:
                return
            self._count(len(part) * cost)
            yield part

    async def turn(self, units: int) -> None:
        """Wait until so much work may be done at once."""
        if self._done >= SLICE:
            await self._next_turn()
        self._count(units)

    async def _next_turn(self) -> None:
        async with self._turn:
            while self._done >= SLICE:
                await asyncio.sleep(0)

    def _count(self, units: int) -> None:
        if units and not self._done:
            asyncio.get_running_loop().call_soon(self._reset)
        self._done += units

    def _reset(self) -> None:
        self._done = 0
