"""When requests are sent: a closed loop of fixed concurrency, or an open loop of fixed rate."""

import asyncio
import itertools
import random
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from time import perf_counter

FAILURE_PAUSE = 0.05  # seconds; keeps a closed loop from spinning on a server that refuses everything

# Takes the scheduled time, returns whether the request succeeded.
Send = Callable[[float], Coroutine[None, None, bool]]


@dataclass(slots=True)
class Budget:
    """The requests still to send: a number, or those scheduled within a duration in seconds."""

    requests: int | None
    duration: float | None

    def try_take(self, elapsed: float) -> bool:
        """Count one more request, `elapsed` seconds after the start; False if the budget is spent."""
        if self.duration is not None and elapsed >= self.duration:
            return False
        if self.requests is not None:
            self.requests -= 1
        return self.requests is None or self.requests >= 0


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """A constant number of requests in flight: each that ends starts the next."""

    value: int
    name: str = "concurrency"

    async def drive(self, send: Send, budget: Budget) -> None:
        """Send until the budget is spent and every request has ended."""
        start = perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(self.value):
                group.create_task(_send_in_turn(send, budget, start))


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Requests at random times (Poisson), `value` per second, even while earlier ones are in flight."""

    value: float
    seed: int
    name: str = "rate"

    def arrivals(self) -> Iterator[float]:
        """Seconds from the start, ascending, determined by the seed."""
        rng, at = random.Random(f"{self.seed} arrivals"), 0.0
        while True:
            yield at
            at += rng.expovariate(self.value)

    async def drive(self, send: Send, budget: Budget) -> None:
        """Send until the budget is spent and every request has ended."""
        start = perf_counter()
        async with asyncio.TaskGroup() as group:
            for at in itertools.takewhile(budget.try_take, self.arrivals()):
                await asyncio.sleep(start + at - perf_counter())
                group.create_task(send(start + at))


Level = ClosedLoop | OpenLoop


async def _send_in_turn(send: Send, budget: Budget, start: float) -> None:
    while budget.try_take((due := perf_counter()) - start):
        if not await send(due):
            await asyncio.sleep(FAILURE_PAUSE)
