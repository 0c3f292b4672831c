"""Long work on the event loop in slices, so that nothing else waits for the whole of it."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Iterable
from itertools import islice
from typing import TypeVar

T = TypeVar("T")

SLICE = 640  # units of work, of some microseconds each
LITTLE = 32  # units, enough for the new tokens of a stream
SLICE_SECONDS = 0.002  # and the rest of its item: units take longer on a busy machine
_LONG_SLICE = 128  # what is not little has the smaller part, so that the loop goes round quickly
LONG_ITERATIONS = 8  # of the loop for one of its slices: the more else there is to do, the longer that takes


class Slicer:
    """Shared by all long work of a loop: an iteration of the loop does one slice, whoever waits for one.

    Little work does not wait for long work: each has a part of the slice, long work in one of some iterations.
    """

    def __init__(self) -> None:
        self._little = _Turns(SLICE - _LONG_SLICE - LITTLE)
        self._long = _Turns(_LONG_SLICE, SLICE_SECONDS, LONG_ITERATIONS)

    async def slices(self, items: Iterable[T], cost: int = 1) -> AsyncIterator[list[T]]:
        """The items in lists; each item takes `cost` units of work, by the iterator or by the caller."""
        rest = iter(items)
        if num_first := LITTLE // cost:
            await self._little.turn(0)
            part = list(islice(rest, num_first))
            self._little.count(len(part) * cost)
            if part:
                yield part
            if len(part) < num_first:
                return
        while True:
            await self._long.turn(0)
            part = list(islice(rest, max(self._long.units_left // cost, 1)))
            if not part:
                return
            self._long.count(len(part) * cost)
            yield part

    async def turn(self, units: int) -> None:
        """Wait until so much work may be done at once."""
        await (self._little if units <= LITTLE else self._long).turn(units)


class _Turns:
    """So many units, or so many seconds and the rest of the item that exceeds them, in some iterations of the loop."""

    def __init__(self, limit: int, seconds: float = math.inf, iterations: int = 1) -> None:
        self._limit, self._seconds, self._iterations = limit, seconds, iterations
        self._turn = asyncio.Lock()  # first come, first served
        self._next: asyncio.Future[None] | None = None  # who has it waits for this
        self._done = 0  # units in these iterations
        self._began = 0.0  # the first of them
        self._iterations_left = 0

    @property
    def units_left(self) -> int:
        return self._limit - self._done

    async def turn(self, units: int) -> None:
        if self._is_over():
            await self._next_turn()
        self.count(units)

    async def _next_turn(self) -> None:
        async with self._turn:
            while self._is_over():
                self._next = asyncio.get_running_loop().create_future()
                await self._next

    def count(self, units: int) -> None:
        if units and not self._done:
            self._began = time.monotonic()
            self._iterations_left = self._iterations
            asyncio.get_running_loop().call_soon(self._next_iteration)
        self._done += units

    def _is_over(self) -> bool:
        return self._done >= self._limit or (self._done > 0 and time.monotonic() - self._began > self._seconds)

    def _next_iteration(self) -> None:
        self._iterations_left -= 1
        if self._iterations_left:
            asyncio.get_running_loop().call_soon(self._next_iteration)
            return
        self._done = 0
        if self._next is not None and not self._next.done():
            self._next.set_result(None)
